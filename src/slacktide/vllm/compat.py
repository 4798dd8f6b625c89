"""Every vLLM internal that we touch, in one place, checked at start.

Read from the sources of 0.29.0, 0.30.0, 0.31.0 and 0.32.0 and tested against all four. What differs between them is
told apart by what is there, not by version numbers. `check` refuses an unknown layout before a request is served.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slacktide.errors import InputError

OLDEST, NEWEST = (0, 29), (0, 32)
"""Releases tested, by (major, minor)."""

SCHEDULER_METHODS = {
    "schedule": "one step",
    "update_from_output": "the end of a step",
    "add_request": "arrivals",
    "finish_requests": "rejection",
    "shutdown": "the end of the engine",
    "_reserve_prefill_lookahead": "the lever for exact chunks, asked for every row",
    "_preempt_request": "choice of victims",
    "_enqueue_waiting_request": "order of the waiting queue",
}
SCHEDULER_FIELDS = {
    "running": "the running list",
    "waiting": "the waiting queue",
    "requests": "live requests by id",
    "finished_req_ids": "requests that ended since the last step",
    "reset_preempted_req_ids": "requests preempted between steps",
    "max_num_scheduled_tokens": "the token cap",
    "max_num_running_reqs": "seats",
    "num_waiting_for_streaming_input": "seats of paused sessions",
    "kv_cache_manager": "KV blocks",
    "block_size": "tokens of a block",
    "max_model_len": "the longest request",
    "policy": "order of the waiting queue",
    "pause_state": "pausing",
    "scheduler_config": "engine flags",
    "num_spec_tokens": "speculative decoding",
    "lora_config": "adapters",
    "hash_block_size": "tokens behind a prefix-block hash",
}
REQUEST_FIELDS = (
    "request_id", "status", "arrival_time", "priority", "sampling_params", "num_prompt_tokens", "max_tokens",
    "num_computed_tokens", "num_output_placeholders", "num_output_tokens", "num_tokens", "num_preemptions",
    "num_stale_output_tokens", "drop_stale_output", "block_hashes", "client_index", "resumable",
    "structured_output_request", "skip_reading_prefix_cache", "lora_request",
)  # fmt: skip
LEVER_PARAMETERS = ["self", "request", "num_computed_tokens", "num_new_tokens"]

Lever = Callable[[Any, int, int], int]

WAITS_FOR_ADAPTER = "slacktide_waits_for_adapter"
"""Name that we give to a waiting Request whose LoRA adapter finds no place; see `hold_for_adapters`."""


def version() -> tuple[int, int] | None:
    """(major, minor) of the installed vLLM; None for a build that does not say (a source tree)."""
    import vllm

    parts = str(getattr(vllm, "__version__", "")).split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) > 1 and parts[0].isdigit() and parts[1].isdigit() else None


def check_classes(scheduler_class: type, request_class: type) -> None:
    """Raise InputError when vLLM's classes are not as we know them: names what is missing and what it is for."""
    import vllm

    found = getattr(vllm, "__version__", "unknown")
    release = version()
    where = f"vLLM {found}: slacktide is tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}"
    if release is not None and (0, 0) < release < OLDEST:
        raise InputError(f"{where}; install a release in that range")
    missing = [f"Scheduler.{n} ({use})" for n, use in SCHEDULER_METHODS.items() if not hasattr(scheduler_class, n)]
    known = set(dir(request_class)) | _assigned(vars(request_class)["__init__"])
    missing += [f"Request.{n}" for n in REQUEST_FIELDS if n not in known]
    if not missing:
        lever = getattr(scheduler_class, "_reserve_prefill_lookahead")  # noqa: B009 (private, and typed as unknown)
        if list(inspect.signature(lever).parameters) != LEVER_PARAMETERS:
            missing.append("Scheduler._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)")
        elif _calls_of_lever(scheduler_class) < 2:
            missing.append("two calls of Scheduler._reserve_prefill_lookahead in schedule() (running and waiting pass)")
    if missing:
        raise InputError(
            f"{where}, and this one lacks {'; '.join(missing)}. Serve without --scheduler-cls, or change vLLM"
        )


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _assigned(function: Any) -> set[str]:
    """Names a function mentions as attributes: those that an `__init__` assigns are among them."""
    return set(function.__code__.co_names)


def _calls_of_lever(scheduler_class: type) -> int:
    """How often `schedule` names the lever; 2 when the source is not there to count."""
    for owner in scheduler_class.__mro__:
        if "schedule" in vars(owner) and owner.__module__.startswith("vllm."):
            try:
                return inspect.getsource(vars(owner)["schedule"]).count("self._reserve_prefill_lookahead(")
            except OSError:
                return 2
    return 0


def check_scheduler(scheduler: Any) -> None:
    """Raise InputError when a built scheduler lacks a field that we use, or an engine feature rules us out."""
    missing = [f"{name} ({use})" for name, use in SCHEDULER_FIELDS.items() if not hasattr(scheduler, name)]
    for path in ("kv_cache_manager.block_pool.get_num_free_blocks", "kv_cache_manager.watermark_blocks",
                 "kv_cache_manager.coordinator.find_longest_cache_hit",
                 "kv_cache_manager.coordinator.single_type_managers"):  # fmt: skip
        owner = scheduler
        for part in path.split("."):
            owner = getattr(owner, part, None)
        if owner is None:
            missing.append(path)
    if missing:
        raise InputError(f"vLLM's scheduler lacks {'; '.join(missing)}: another layout than the tested releases")
    config = scheduler.vllm_config
    model = config.model_config
    refused = {
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "an encoder-cache connector": getattr(config, "ec_transfer_config", None) is not None,
        "an encoder-decoder model": bool(model.is_encoder_decoder),
        "a diffusion model": bool(getattr(model, "is_diffusion", False)),
        "pooling (embedding, scoring)": model.runner_type == "pooling",
        # Our chunks end where a policy wants them to:
        "prompts in one piece (--no-enable-chunked-prefill)": not scheduler.scheduler_config.enable_chunked_prefill,
        "multimodal input in one piece (--disable-chunked-mm-input)": bool(
            getattr(scheduler.scheduler_config, "disable_chunked_mm_input", False)
        ),
        "a hybrid model whose prefix cache wants aligned chunks (--mamba-cache-mode align)": bool(
            getattr(scheduler, "need_mamba_block_aligned_split", False)
        ),
    }
    for feature, used in refused.items():
        if used:
            raise InputError(f"slacktide does not schedule {feature}: serve it without --scheduler-cls")


def check_async(scheduler_config: Any, is_async: bool, own_name: str, other_name: str) -> None:
    """Raise InputError when the class does not match vLLM's final word on async scheduling.

    vLLM switches async scheduling off by itself (CPU, ngram speculation, pipeline parallel) and leaves scheduler_cls.
    """
    if bool(scheduler_config.async_scheduling) != is_async:
        state = "on" if scheduler_config.async_scheduling else "off"
        raise InputError(
            f"async scheduling is {state} in this engine, so {own_name} cannot run it: use --scheduler-cls {other_name}"
        )


# ---- reading ---------------------------------------------------------------------------------------------------------


def unpaused(scheduler: Any) -> bool:
    """True unless the engine is paused in any way."""
    return bool(scheduler.pause_state.value == type(scheduler.pause_state).UNPAUSED.value)


def is_ready(request: Any) -> bool:
    """Whether vLLM could admit a waiting request now: grammar ready, no stale output on its way, adapter has room."""
    if getattr(request, WAITS_FOR_ADAPTER, False):
        return False
    name = request.status.name
    if name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
        wanted = request.structured_output_request
        return wanted is not None and wanted.grammar is not None  # a failed one too: vLLM ends it when it is reached
    if name.startswith("WAITING_FOR_"):
        return False
    return not request.num_stale_output_tokens or bool(request.drop_stale_output)


def is_blocked(request: Any) -> bool:
    """Whether a new request may not be ready yet."""
    return bool(request.status.name.startswith("WAITING_FOR_"))


def _surely_ends(request: Any) -> bool:
    """Whether the step in flight ends a running request for its length: vLLM does not serve it again (its own test)."""
    held = request.num_output_placeholders
    return bool(held and request.num_computed_tokens + 2 - held >= request.num_prompt_tokens + request.max_tokens)


def hold_for_adapters(scheduler: Any) -> list[str]:
    """Mark waiting requests whose LoRA adapter finds no place beside those of the running ones; returns their ids.

    vLLM looks at the adapters of the rows it serves in a step, which are all that run; a policy that leaves rows out
    would let it admit more than `max_loras` adapters, and the next full step would fail on vLLM's own assertion.
    """
    most = scheduler.lora_config.max_loras
    taken = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request and not _surely_ends(r)}
    held = []
    for request in itertools.chain.from_iterable(getattr(scheduler, name) for name in waiting_queues(scheduler)):
        adapter = request.lora_request.lora_int_id if request.lora_request else None
        waits = adapter is not None and adapter not in taken and len(taken) >= most
        setattr(request, WAITS_FOR_ADAPTER, waits)
        if waits:
            held.append(request.request_id)
        elif adapter is not None:
            taken.add(adapter)
    return held


def num_free_blocks(scheduler: Any) -> int:
    """Free KV blocks."""
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def num_usable_blocks(scheduler: Any) -> int:
    """KV blocks in all, without vLLM's null block."""
    return int(scheduler.kv_cache_manager.block_pool.num_gpu_blocks) - 1


def prefix_caching(scheduler: Any) -> bool:
    """Whether waiting requests can find cached prefixes."""
    return bool(scheduler.kv_cache_manager.enable_caching)


def chained_prefixes(scheduler: Any) -> bool:
    """Whether a prefix is cached from its first block on or not at all: one group of full attention, whole blocks."""
    manager = scheduler.kv_cache_manager
    kinds = [type(m).__name__ for m in manager.coordinator.single_type_managers]
    whole = getattr(manager.block_pool, "hash_block_size", None) == getattr(manager.coordinator, "block_size", 0)
    return kinds == ["FullAttentionManager"] and whole and _keyed_as_known()


_GROUP_0 = bytes(4)
"""What vLLM appends to a block's hash to key the block of its first KV group."""


def _keyed_as_known() -> bool:
    try:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id as key
    except ImportError:
        return False
    return bool(key(b"hash", 0) == b"hash" + _GROUP_0)


def first_blocks(pool: Any) -> dict[bytes, Any] | None:
    """The pool's own map of cached blocks, keyed by a block's hash and its group in four bytes; None if kept otherwise.

    Asking the map takes a tenth of `get_cached_block`. Never kept: `reset_prefix_cache` puts a new one in its place.
    """
    known = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    return known if type(known) is dict else None


def cache_hits(scheduler: Any, requests: Sequence[Any], *, chained: bool = False) -> tuple[list[int], list[int]]:
    """(tokens that waiting requests would find in the prefix cache, of their blocks those nobody holds), one each.

    No side effects. The last token is always computed, hence num_tokens - 1. `chained`: `chained_prefixes`; most
    prompts are new, and one look at the first block tells so in a fraction of the time.
    """
    tokens, unheld = [0] * len(requests), [0] * len(requests)
    manager = scheduler.kv_cache_manager
    known = first_blocks(manager.block_pool) if chained else None
    for i, request in enumerate(requests):
        hashes = request.block_hashes
        if known is not None and (not hashes or hashes[0] + _GROUP_0 not in known):
            continue
        if request.skip_reading_prefix_cache:
            continue
        found = manager.coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1)
        tokens[i] = int(found[1])
        unheld[i] = sum(1 for group in found[0] for block in group if block.ref_cnt == 0 and not block.is_null)
    return tokens, unheld


def num_shared_blocks(scheduler: Any, request: Any) -> int:
    """Blocks of a running request that others hold too."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(
        1
        for m in managers
        for block in m.req_to_blocks.get(request.request_id, ())
        if block.ref_cnt > 1 and not block.is_null
    )


def num_held_blocks(scheduler: Any, request: Any) -> int:
    """Blocks of a request, over all KV groups."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(m.req_to_blocks.get(request.request_id, ())) for m in managers)


# ---- steering --------------------------------------------------------------------------------------------------------


def admission_lever(scheduler: Any) -> str:
    """The field that bounds admission: from 0.31 on one of its own, before that the number of seats."""
    return "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"


def preempt(scheduler: Any, requests: Iterable[Any]) -> None:
    """Take requests out of the running list: their KV is freed, they head the waiting queue."""
    for request in requests:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())


def reject(scheduler: Any, request_ids: Sequence[str]) -> list[Any]:
    """End requests with an error. Their clients still have to be told (error_output)."""
    from vllm.v1.request import RequestStatus

    return list(scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ERROR))


def tell_rejected(outputs: dict[int, Any], requests: Iterable[Any], reason: str) -> None:
    """Put the end of rejected requests into what the engine returns to its clients (finish_reason `error`)."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    for request in requests:
        end = EngineCoreOutput(
            request_id=request.request_id, new_token_ids=[], finish_reason=FinishReason.ERROR, stop_reason=reason,
            events=request.take_events(), trace_headers=request.trace_headers,
        )  # fmt: skip
        if request.client_index in outputs:
            outputs[request.client_index].outputs.append(end)
        else:
            outputs[request.client_index] = EngineCoreOutputs(outputs=[end])


def waiting_queues(scheduler: Any) -> list[str]:
    """Names of the queues that ordinary waiting requests stand in, in the order vLLM drains them.

    0.29 and 0.30 keep passed-over requests in `skipped_waiting`; from 0.31 on they stay in `waiting`.
    """
    return ["skipped_waiting", "waiting"] if hasattr(scheduler, "skipped_waiting") else ["waiting"]


class WaitingOrder:
    """Puts chosen requests at the head of the waiting queue for one step, and the rest back in order after it."""

    def __init__(self, scheduler: Any, chosen: Sequence[Any]) -> None:
        """Rearrange so that vLLM's scan meets `chosen` first, in that order. Nothing moves when it would anyway."""
        self._scheduler, self._chosen = scheduler, chosen
        self._saved: list[tuple[str, Any]] = []
        self._before: list[list[Any]] = []
        names = waiting_queues(scheduler)
        queues = [getattr(scheduler, name) for name in names]
        self._heap = scheduler.policy.value == "priority"
        if self._heap:
            if len(queues) == 1 and _heap_starts_with(queues[0], chosen):
                return
            self._take_from_heaps(names, queues)
            return
        head = list(itertools.islice(itertools.chain.from_iterable(queues), len(chosen)))
        if all(a is b for a, b in zip(head, chosen, strict=False)) and len(head) == len(chosen):
            return
        self._before = [list(queue) for queue in queues]
        for queue in queues:
            queue.remove_requests(chosen)  # one pass; one by one, 30 of 500 took a millisecond
        if sum(map(len, queues)) != sum(map(len, self._before)) - len(chosen):
            raise RuntimeError("a request to admit does not wait")
        target = next((queue for queue in queues if queue), queues[-1])
        for request in reversed(chosen):
            target.prepend_request(request)

    def _take_from_heaps(self, names: list[str], queues: list[Any]) -> None:
        """A heap cannot be given an order: for this step plain queues stand in for the heaps."""
        from vllm.v1.core.sched.request_queue import FCFSRequestQueue

        for name, queue in zip(names, queues, strict=True):
            queue.remove_requests(list(self._chosen))
            self._saved.append((name, queue))
            setattr(self._scheduler, name, FCFSRequestQueue())
        getattr(self._scheduler, names[-1]).extend(self._chosen)

    def restore(self) -> None:
        """Undo what is left of it: chosen requests that were not admitted go back to their places."""
        scheduler = self._scheduler
        if self._saved:
            left: list[Any] = []
            for name, queue in self._saved:
                left += list(getattr(scheduler, name))
                setattr(scheduler, name, queue)
            for request in left:
                scheduler._enqueue_waiting_request(request)
        elif self._before:
            names = waiting_queues(scheduler)
            waiting = {id(r) for name in names for r in getattr(scheduler, name)}
            if not any(id(request) in waiting for request in self._chosen):
                return
            known = {id(r) for before in self._before for r in before}
            for name, before in zip(names, self._before, strict=True):
                queue = getattr(scheduler, name)
                new = [r for r in queue if id(r) not in known]  # preempted in this step: they stay in front
                queue.clear()
                queue.extend(new + [r for r in before if id(r) in waiting])


def _heap_starts_with(queue: Any, chosen: Sequence[Any]) -> bool:
    """Whether popping the heap gives exactly `chosen`, in order. Pops a copy: as many steps as there are chosen."""
    return all(a is b for a, b in zip(itertools.islice(iter(queue), len(chosen)), chosen, strict=True))
