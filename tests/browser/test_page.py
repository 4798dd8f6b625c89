"""The page in a real browser: it renders in both themes and on a phone, its controls work, nothing complains.

Skipped where there is no Chromium.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from slacktide.report.files import write_json
from slacktide.report.html import write_html
from slacktide.report.source import Run, Source, read_source

from ..unit.looks import overloaded
from ..unit.test_report_html import a_goodput, a_validation, an_advice
from .chromium import BINARY, Browser

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium here")


def browse(tmp_path: Path, visit: Callable[[Browser, Path], Awaitable[None]]) -> None:
    runs = []
    for name in ("vllm-v1", "sliding"):
        record, log, decisions = overloaded(name)
        label = f"{name}:{'a_parameter=1,' * (name == 'sliding')}b=2"  # long and short names must find room
        runs.append(Run(record | {"label": label}, log, decisions))
    file = tmp_path / "page.html"
    write_html(file, Source("runs", runs, {}, "test"))

    async def run() -> None:
        async with Browser(tmp_path / "profile") as page:
            await visit(page, file)
            assert page.problems == []

    asyncio.run(run())


OVERFLOWING = "document.documentElement.scrollWidth > innerWidth"
PAPER = "getComputedStyle(document.body).backgroundColor"
TIP = "document.getElementById('tip')"
SMALLEST_TYPE = """Math.min(...[...document.querySelectorAll('svg.chart text')].filter(t => t.getClientRects().length
  && getComputedStyle(t).display !== 'none').map(t => parseFloat(getComputedStyle(t).fontSize)
  * t.ownerSVGElement.getBoundingClientRect().width / 560))"""
DRAWN_OUTSIDE = """[...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length).flatMap(s => {
  const box = s.getBoundingClientRect(); return [...s.querySelectorAll('text')].filter(t => {
    const b = t.getBoundingClientRect(); return b.width && (b.left < box.left - 1 || b.right > box.right + 1
      || b.top < box.top - 1 || b.bottom > box.bottom + 1); }).map(t => s.id + ': ' + t.textContent); })"""
CONTRAST = """(() => { const rgb = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  const light = c => { const [r, g, b] = rgb(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll('h1, p, td, th, summary, .notes li, svg text')].map(e => {
    const s = getComputedStyle(e), ink = light(e.ownerSVGElement ? s.fill : s.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05); })); })()"""


def test_it_renders_in_both_themes_and_on_a_phone(tmp_path: Path) -> None:
    async def visit(page: Browser, file: Path) -> None:
        papers = set()
        for width in (1280, 390):
            for dark in (False, True):
                await page.show(file, width, dark=dark)
                assert await page.run("document.querySelectorAll('svg.chart').length") >= 10
                assert not await page.run(OVERFLOWING), width
                assert await page.run(DRAWN_OUTSIDE) == [], width
                assert await page.run(SMALLEST_TYPE) >= (11 if width > 600 else 10.5)
                assert await page.run(CONTRAST) >= 4.5
                papers.add(await page.run(PAPER))
        assert len(papers) == 2
        await page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000

    browse(tmp_path, visit)


def test_controls_by_pointer_and_keyboard(tmp_path: Path) -> None:
    async def visit(page: Browser, file: Path) -> None:
        await page.show(file)
        first, second = (f"document.querySelectorAll('#ttft .step')[{i}].getClientRects().length" for i in (0, 1))
        assert await page.run(first)
        await page.run("document.querySelector('button.switch').focus()")
        await page.press("Enter")
        assert await page.run("document.querySelector('button.switch').getAttribute('aria-pressed')") == "false"
        assert not await page.run(first)
        assert await page.run(second)
        await page.press(" ")
        assert await page.run(first)

        paper = await page.run(PAPER)
        await page.run("document.getElementById('theme').click()")
        assert await page.run(PAPER) != paper

        box = await page.run("(({x, y, width, height}) => ({x, y, width, height}))"
                             "(document.getElementById('ttft').getBoundingClientRect())")  # fmt: skip
        await page.run(f"scrollTo(0, {box['y'] - 100})")
        await page.move(box["x"] + box["width"] * 0.6, 100 + box["height"] / 2)
        assert not await page.run(f"{TIP}.hidden")
        text = await page.run(f"{TIP}.innerText")
        assert "milliseconds" in text
        assert "vllm-v1" in text
        assert "sliding" in text
        assert "%" in text

        await page.run("document.querySelector('details.run[open] svg[id$=modes]').focus()")
        await page.press("ArrowRight")
        before = await page.run(f"{TIP}.innerText")
        assert "mixed" in before
        await page.press("ArrowRight")
        assert await page.run(f"{TIP}.innerText") != before
        await page.press("Escape")
        assert await page.run(f"{TIP}.hidden")

        await page.run("document.querySelector('details.run:not([open]) > summary').click()")
        assert await page.run("document.getElementById('run0-kv').getClientRects().length")

    browse(tmp_path, visit)


def test_pages_without_runs(tmp_path: Path) -> None:
    files = {"goodput.json": a_goodput(), "advise.json": an_advice(), "validation.json": a_validation()}
    for name, value in files.items():
        write_json(tmp_path / name, value)
        write_html(tmp_path / f"{name}.html", read_source(tmp_path / name))

    async def visit(page: Browser, _: Path) -> None:
        for name in files:
            for width in (1280, 390):
                await page.show(tmp_path / f"{name}.html", width, dark=width == 390)
                assert not await page.run(OVERFLOWING), name
                assert await page.run(DRAWN_OUTSIDE) == [], name
                for chart in await page.run("[...document.querySelectorAll('svg.chart')].map(s => s.id)"):
                    await page.run(f"document.getElementById('{chart}').focus()")
                    await page.press("ArrowRight")
                    assert await page.run(f"{TIP}.innerText.split('\\n').length") > 1, chart

    browse(tmp_path, visit)


def test_the_tip_reads_what_the_table_says(tmp_path: Path) -> None:
    """At the time that the summary calls the 90th percentile, the curve says 90 %."""

    async def visit(page: Browser, file: Path) -> None:
        await page.show(file)
        _, log, _ = overloaded("vllm-v1")
        shown = await page.run(
            """(() => { const data = JSON.parse(document.querySelector('script[data-for=ttft]').textContent);
               const s = data.s[0], i = s.y.findIndex(v => v >= 0.9); return s.x[i]; })()"""
        )
        first = sorted((log.first_token_time - log.arrival_time)[log.finished] * 1e3)
        assert shown == pytest.approx(first[int(0.9 * log.n) - 1], rel=0.02)

    browse(tmp_path, visit)
