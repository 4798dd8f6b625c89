"""Pages of the documentation that are made from the code, each time the site is built (a hook of mkdocs).

They are in no checkout: command line, policies, metrics of a server, SLO presets, the list of decisions.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DECISIONS = sorted(path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md"))


def pages() -> dict[str, str]:
    """Path below docs/ -> Markdown."""
    return {
        "reference/cli.md": command_line(),
        "reference/policies.md": policies(),
        "reference/server-metrics.md": server_metrics(),
        "reference/slos.md": presets(),
        "decisions/index.md": decisions(),
    }


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the settings that all simulations take into the page that asks for them."""
    return markdown.replace("<!-- settings -->", settings())


def settings() -> str:
    """The fields of `slacktide.api.Load` as a table; engine settings are explained by their flags."""
    from slacktide.api import Load
    from slacktide.cli.options import ENGINE_FLAGS
    from slacktide.core.spec import _field_docs

    docs = _field_docs(Load) | {name: flag.help for name, flag in ENGINE_FLAGS.items()}
    kinds = {name: cell(getattr(kind, "__forward_arg__", kind)) for name, kind in Load.__annotations__.items()}
    rows = [f"| `{name}` | {kind} | {cell(docs.get(name, ''))} |" for name, kind in kinds.items()]
    return "\n".join(["| name | type | meaning |\n|---|---|---|", *rows])


def command_line() -> str:
    """One section a verb: description, example, arguments."""
    from slacktide.cli.main import VERBS, load_verb, parser_of

    parts = ["# Command line\n", "| verb | what it does |\n|---|---|"]
    parts += [f"| [`{verb}`](#slacktide-{verb}) | {cell(line)} |" for verb, (_, line) in VERBS.items()]
    parts.append(
        "\nNumbers may be written as vLLM does (8k = 8000, 8K = 8192), dashes and underscores in flags are one, and\n"
        "no flag is abbreviated. Exit status: 0 done, 1 it ran and says no, 2 input you can mend (one line), 130\n"
        "interrupted.\n"
    )
    for verb in VERBS:
        parser = parser_of(verb, load_verb(verb))
        text, _, example = (parser.description or "").partition("example:")
        parts.append(f"\n## slacktide {verb}\n\n{prose(text)}\n\n```bash\n{dedented(example)}\n```\n")
        for group in parser._action_groups:
            rows = [row for action in group._group_actions if (row := argument(action))]
            if rows:
                parts.append(f"**{cell((group.title or '').capitalize())}**\n\n| argument | meaning |\n|---|---|")
                parts += [f"| {name} | {meaning} |" for name, meaning in rows]
                parts.append("")
    return "\n".join(parts) + "\n"


def argument(action: argparse.Action) -> tuple[str, str] | None:
    """A row of the table, or None for what everybody knows."""
    if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
        return None
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    shown = "" if action.nargs == 0 or not action.option_strings else f" {value}"
    if not action.option_strings:
        return f"`{value}`", cell(action.help or "")
    names = ", ".join(f"`{option}{shown}`".replace("|", "\\|") for option in action.option_strings)
    return names, cell((action.help or "").replace("%%", "%")) + (" (required)" if action.required else "")


def policies() -> str:
    """Every policy: description and parameters."""
    from slacktide.cli.policies import _default, _values, describe
    from slacktide.core.policy import names

    parts = ["# Policies\n", "Which to try: [Choose a policy](../how-to/choose-a-policy.md). Parameters: ",
             "`--policy NAME:parameter=value,parameter=value`.\n"]  # fmt: skip
    found = [describe(name) for name in names()]
    parts.append("| policy | what it does |\n|---|---|")
    parts += [f"| [`{policy['name']}`](#{policy['name']}) | {cell(policy['summary'])} |" for policy in found]
    for policy in found:
        marks = [text for key, text in (("oracle", "sees true output lengths"),) if policy[key]]
        marks += [] if policy["steerable"] else ["simulator only"]
        parts.append(f"\n## {policy['name']}\n\n{prose(policy['description'])}\n")
        parts += [f"*{'; '.join(marks)}*\n"] if marks else []
        if policy["parameters"]:
            parts.append("| parameter | default | values | meaning |\n|---|---|---|---|")
        for each in policy["parameters"]:
            meaning, values = cell(each["description"]), cell(_values(each))
            parts.append(f"| `{each['name']}` | {cell(_default(each))} | {values} | {meaning} |")
    return "\n".join(parts) + "\n"


def server_metrics() -> str:
    """What the plug-in adds to `/metrics`."""
    from slacktide.vllm.metrics import FAMILIES, PREFIX

    parts = [
        "# Server metrics\n",
        "The plug-in adds these to the server's own `/metrics`, each with the label `engine`. Counters appear with",
        "their first count. A dashboard and alert rules over them: `dashboards/`; at a terminal: `slacktide top`.\n",
        "| metric | type | labels | meaning |\n|---|---|---|---|",
    ]
    for name, (kind, labels, text) in FAMILIES.items():
        suffix = "_total" if kind == "counter" else ""
        parts.append(f"| `{PREFIX}{name}{suffix}` | {kind} | {', '.join(labels) or '-'} | {cell(text)} |")
    parts.append(f"| `{PREFIX}admission_rejected_total` | counter | - | Requests the middleware turned away |")
    parts.append(
        f"| `{PREFIX}admission_invalid_total` | counter | - | Requests with targets that cannot be read (HTTP 400) |"
    )
    return "\n".join(parts) + "\n"


def presets() -> str:
    """Named SLOs."""
    from slacktide.workload.slos import list_slo_presets

    rows = [f"| `{p.name}` | `{p.slo}` | {cell(p.source)} |" for p in list_slo_presets()]
    return (
        "\n".join(["# SLO presets\n", "`--slo NAME`.\n", "| name | targets (ms) | source |\n|---|---|---|", *rows])
        + "\n"
    )


def decisions() -> str:
    """Their titles."""
    lines = []
    for name in DECISIONS:
        title = (ROOT / "docs/decisions" / name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({name})")
    return "# Decisions\n\nChoices that others would otherwise make again.\n\n" + "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """A description as Markdown: indented lines are code, and angle brackets are no HTML."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        out: list[str] = []
        for line in lines:
            if line.startswith("  ") and not (out and out[-1].startswith("- ")):
                out.append(f"\n    {line.strip()}\n")
            else:
                out.append(line.replace("<", "&lt;"))
        blocks.append("\n".join(out))
    return "\n\n".join(blocks)


def dedented(text: str) -> str:
    return "\n".join(line.removeprefix("  ") for line in text.strip("\n").splitlines())


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
