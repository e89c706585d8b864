"""A gateway on loopback and a browser in front of it, for the tests of pages; and what a page must be for everybody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

CHECKS = r"""() => {
  // What axe-core would ask, as far as these pages go: names, headings, landmarks, tables, contrast.
  const wrong = [];
  const shown = (one) => one.checkVisibility({ visibilityProperty: true });
  const text = (one) => (one.textContent || "").trim();
  const named = (one) => {
    if (one.getAttribute("aria-label") || one.title) return true;
    const by = one.getAttribute("aria-labelledby");
    if (by) return by.split(" ").every((id) => document.getElementById(id) && text(document.getElementById(id)));
    if (one.labels && one.labels.length) return [...one.labels].some(text);
    return Boolean(text(one));
  };
  if (!document.documentElement.lang) wrong.push("no language");
  if (!document.title) wrong.push("no title");
  for (const [what, count] of [["h1", 1], ["main", 1], ["body > header", 1], ["body > footer", 1]])
    if (document.querySelectorAll(what).length !== count) wrong.push(`want ${count} ${what}`);
  let last = 0;
  for (const one of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const level = Number(one.tagName[1]);
    if (level > last + 1) wrong.push(`heading skips a level: ${text(one)}`);
    if (!text(one)) wrong.push("empty heading");
    last = level;
  }
  for (const one of document.querySelectorAll("input:not([type=hidden]), select, textarea"))
    if (!one.labels.length || !named(one)) wrong.push(`no label: ${one.name}`);
  for (const one of document.querySelectorAll("a, button, summary, nav, [role=region], progress"))
    if (!named(one)) wrong.push(`no name: ${one.outerHTML.slice(0, 80)}`);
  for (const one of document.querySelectorAll("[aria-describedby], [aria-labelledby]"))
    for (const name of ["aria-describedby", "aria-labelledby"])
      for (const id of (one.getAttribute(name) || "").split(" ").filter(Boolean))
        if (!document.getElementById(id)) wrong.push(`${name} leads nowhere: ${id}`);
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  for (const id of new Set(ids)) if (ids.filter((one) => one === id).length > 1) wrong.push(`id twice: ${id}`);
  for (const one of document.querySelectorAll("table")) {
    if (!one.caption || !text(one.caption)) wrong.push("table without caption");
    for (const head of one.querySelectorAll("th")) if (!head.scope) wrong.push(`th without scope: ${text(head)}`);
  }
  for (const one of document.querySelectorAll("[tabindex]")) if (one.tabIndex > 0) wrong.push("positive tabindex");

  const numbers = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const under = (one) => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const light = (colour) => {
    const line = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.slice(0, 3).map((v) => line(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, two) => {
    const [a, b] = [light(one), light(two)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  let least = 21;
  for (const one of document.querySelectorAll("body *")) {
    if (![...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()) || !shown(one)) continue;
    const found = contrast(numbers(getComputedStyle(one).color), under(one));
    least = Math.min(least, found);
    if (found < 4.5) wrong.push(`contrast ${found.toFixed(2)}: ${text(one).slice(0, 40)}`);
  }
  const fields = "input:not([type=hidden]):not([type=checkbox]), select, textarea";
  for (const one of document.querySelectorAll(`${fields}, progress`))
    if (shown(one) && contrast(numbers(getComputedStyle(one).borderTopColor), under(one.parentElement)) < 3)
      wrong.push(`edge too faint: ${one.name}`);

  for (const one of document.querySelectorAll(`${fields}, a.button, button`))
    if (shown(one) && one.getBoundingClientRect().height < 24)
      wrong.push(`too small to touch: ${one.outerHTML.slice(0, 80)}`);
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) wrong.push(`the page is ${wide} pixels wider than the screen`);
  return wrong;
}"""
"""JavaScript that lists what is wrong with a page."""

CONTROLS = """() => [...document.querySelectorAll(
    "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']"
  )].filter((one) => one.checkVisibility({ visibilityProperty: true })).map((one, place) => {
    one.dataset.place = place; return String(place); })"""
FOCUSED = """() => {
    const one = document.activeElement, style = getComputedStyle(one);
    return [one.dataset.place || "", style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2]; }"""


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """The application on a free port of loopback."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", server_header=False, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=5)
