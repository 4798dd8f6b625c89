"""Print the papers and data behind policies, profiles and traces, or behind a result.

NAME is a policy, a profile, a trace, or what --out wrote (a JSON file or its directory). Without one, every paper that
something here rests on. With --bibtex, entries for a bibliography; authors beyond the first may stand as "et al.".

example:
  slacktide cite sliding h100/llama-3-8b azure-conv
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from slacktide.cli.output import emit
from slacktide.errors import InputError, unknown_name


@dataclasses.dataclass(frozen=True, slots=True)
class Paper:
    """One work, and how descriptions name it."""

    key: str
    pattern: str
    """Regular expression over descriptions, attributions and sources."""
    authors: str
    title: str
    where: str
    year: int
    url: str

    @property
    def text(self) -> str:
        """One line for a list of references. "and others" is BibTeX's word for what prose calls "et al."."""
        authors = self.authors.replace(" and others", " et al.").replace(" and ", "; ")
        return f"{authors}: {self.title}. {self.where}, {self.year}"


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """One reference of one name."""

    of: str
    """The policy, profile or trace."""
    text: str
    url: str = ""
    key: str = ""
    """Of the paper, where it is one."""


@functools.cache
def papers() -> tuple[Paper, ...]:
    """What the packaged policies, profiles and traces rest on (data/papers.json)."""
    text = resources.files("slacktide.data").joinpath("papers.json").read_text(encoding="utf-8")
    return tuple(Paper(**fields) for fields in json.loads(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Names, and the form."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="a policy, profile, trace, or a result")
    parser.add_argument("--bibtex", action="store_true", help="print BibTeX entries")


def run(args: argparse.Namespace) -> int:
    """Print the sources. Raises InputError for a name that is nothing."""
    found = sources_of(args.names)
    value = {"sources": [{"for": s.of, "text": s.text, "url": s.url, "key": s.key} for s in found]}
    emit(args, "cite", value, lambda: print(_bibtex(found) if args.bibtex else _listed(found)))
    return 0


def sources_of(names: list[str]) -> list[Source]:
    """The sources of each name in order; of nothing, every paper. Raises InputError for an unknown name."""
    if not names:
        return [_of_paper("slacktide", paper) for paper in papers()]
    found: list[Source] = []
    for name in names:
        for single in _names_in(name):
            found += [source for source in _sources(single) if source not in found]
    return found


def _names_in(name: str) -> list[str]:
    """A result's policies, profiles and traces; any other name stands for itself."""
    path = Path(name)
    if path.is_dir():
        known = ("compare.json", "goodput.json", "sweep.json", "advise.json", "summary.json")
        files = [path / file for file in known if (path / file).is_file()]
        if not files:
            raise InputError(f"{name}: no result in this directory; expected one of {', '.join(known)}")
        path = files[0]
    elif path.suffix != ".json" or not path.is_file():
        return [name]
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if isinstance(data, dict) and "latency" in data:
        return [name]  # a profile's file
    records: Any = data.get("runs", [data]) if isinstance(data, dict) else []
    records = records if isinstance(records, list) else []
    named = [
        str(r[key]) for r in records if isinstance(r, dict) for key in ("policy", "profile", "trace") if r.get(key)
    ]
    if not named:
        raise InputError(f"{path}: names no policy, profile or trace; expected a result of slacktide")
    return [single for single in dict.fromkeys(named) if _known(single)]


def _known(name: str) -> bool:
    """Results may name a user's own trace file or policy that is not here now: nothing is known of those."""
    try:
        _sources(name)
    except (InputError, OSError):
        return False
    return True


def _sources(name: str) -> list[Source]:
    """Of one policy, profile or trace. Raises InputError."""
    from slacktide.core.policy import names as policy_names
    from slacktide.workload.packaged import PACKAGED, find_packaged

    policy, _, _ = name.partition(":")
    if policy in policy_names() or (":" in name and "=" not in name and "/" not in name):
        return _of_policy(policy if policy in policy_names() else name)
    trace = find_packaged(name)
    if trace is not None:
        return [Source(name, f"{trace.attribution} ({trace.licence})", _url(trace.source)),
                *_papers(name, f"{trace.attribution} {trace.source}")]  # fmt: skip
    if "/" in name or name.endswith(".json"):
        return _of_profile(name)
    known = [*policy_names(), *(t.name for t in PACKAGED)]
    raise unknown_name("policy, profile, trace or result", name, known)


def _of_policy(name: str) -> list[Source]:
    from slacktide.cli.policies import describe

    text = " ".join(describe(name)["description"].split())
    match = re.search(r"\bSource: (.*?)(?:(?<!et al)\. |\.?$)", text)
    own = [Source(name, match[1])] if match else []
    return own + _papers(name, match[1] if match else text)


def _of_profile(name: str) -> list[Source]:
    from slacktide.profiling.profiles import load_profile

    profile = load_profile(name)
    basis = f"{profile.label}: {profile.sources.get('basis', '')}"
    return [Source(name, basis), *_papers(name, " ".join(profile.sources.values()))]


def _papers(of: str, text: str) -> list[Source]:
    return [_of_paper(of, paper) for paper in papers() if re.search(paper.pattern, text)]


def _of_paper(of: str, paper: Paper) -> Source:
    return Source(of, paper.text, paper.url, paper.key)


def _url(text: str) -> str:
    match = re.search(r"https://\S+", text)
    return match[0].rstrip(",") if match else ""


def _listed(found: list[Source]) -> str:
    return "\n".join(f"{s.of}: {s.text}" + (f" {s.url}" if s.url else "") for s in found)


def _bibtex(found: list[Source]) -> str:
    keys = {source.key for source in found}
    return "\n\n".join(_entry(paper) for paper in papers() if paper.key in keys)


def _entry(paper: Paper) -> str:
    fields: dict[str, Any] = {"author": paper.authors, "title": f"{{{paper.title}}}", "howpublished": paper.where,
                              "year": paper.year, "url": paper.url}  # fmt: skip
    given = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
    return f"@misc{{{paper.key},\n{given}}}"
