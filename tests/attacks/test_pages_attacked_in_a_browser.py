"""Attacks on the gateway's pages that only a browser shows: scripts that run, frames, forms of another site."""

import http.server
import threading

import pytest

from tests import chromium
from tests.gateway import clinic as made
from tests.gateway.clinic import VISITS, done
from tests.gateway.pages_in_chromium import serving

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, chromium.wanted]
HOSTILE = """"'></textarea></code><script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>{{7*7}}"""


@pytest.fixture
def world(tmp_path):
    found = made.Clinic(tmp_path, {"hosts": ["testserver", "127.0.0.1", "localhost"]})
    done(found.owner.post("/datasets/visits", json=VISITS | {"about": HOSTILE}))
    found.lend("ann", allowance=0.0)
    found.lend("eve", role="officer")
    sql = f"SELECT COUNT(*) AS n FROM visits WHERE region = '{HOSTILE.replace(chr(39), '')}'"
    told = {"sql": sql, "epsilon": 0.1, "purpose": HOSTILE, "reason": HOSTILE}
    found.request = done(found.client("ann").post("/datasets/visits/ask", json=told))["request"]
    with serving(found.app) as found.address, playwright.sync_playwright() as started:
        found.browser = started.chromium.launch(executable_path=chromium.CHROMIUM, args=list(chromium.FLAGS))
        yield found
        found.browser.close()
    found.close()


def logged_in(world, name):
    page = world.browser.new_context().new_page()
    page.goto(world.address + "/login")
    page.fill("#token", world.tokens[name])
    page.press("#token", "Enter")
    page.wait_for_url(world.address + "/")
    return page


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Another site, on another port of this machine, under another name."""

    page = b""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_):
        """Nothing."""


def test_no_words_of_anybody_run_as_a_script(world):
    said = []
    for name, paths in {
        "ann": ("/", "/pages/datasets/visits", f"/pages/requests/{world.request}", "/pages/datasets/visits/ask"),
        "eve": ("/", "/pages/requests", f"/pages/requests/{world.request}", "/pages/datasets/visits/spending"),
    }.items():
        page = logged_in(world, name)
        page.on("dialog", lambda one: (said.append(one.message), one.dismiss()))
        for path in paths:
            page.goto(world.address + path)
            assert page.locator("img, main svg, main script").count() == 0, path
        if name == "ann":  # what the script puts into the page
            page.fill("#sql", HOSTILE)
            page.wait_for_selector("#price .problem")
            page.fill("#sql", 'SELECT COUNT(*) AS "' + HOSTILE.replace('"', "") + '" FROM visits')
            page.wait_for_timeout(1_000)
            assert page.locator("#price img, #price svg, #price script").count() == 0
        else:
            page.goto(f"{world.address}/pages/requests/{world.request}")
            page.fill("#reason", HOSTILE)
            page.click("text=Approve and charge")
            page.wait_for_selector("text=Approved: it was charged")
            assert page.locator("main img, main svg, main script").count() == 0
    assert said == []


def test_another_site_can_neither_frame_nor_post(world):
    """Clickjacking, and a form that sends itself: the cookie does not travel, the frame stays empty."""
    eve = logged_in(world, "eve")
    place = f"{world.address}/pages/requests/{world.request}"
    Elsewhere.page = (
        f"<iframe name=f src='{place}'></iframe>"
        f"<form id=x method=post action='{place}/deny'><input name=reason value=evil></form>"
        f"<form id=l method=post action='{world.address}/login'>"
        f"<input name=token value='{world.tokens['ann']}'></form>"
    ).encode()
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    address = f"http://localhost:{site.server_port}/"
    eve.goto(address)
    eve.wait_for_timeout(500)
    assert not any("Your decision" in frame.content() for frame in eve.frames)
    eve.evaluate("document.getElementById('x').submit()")
    eve.wait_for_url(world.address + "/**")
    assert done(world.owner.get(f"/requests/{world.request}"))["state"] == "waiting"
    eve.goto(address)
    eve.evaluate("document.getElementById('l').submit()")  # would log eve in as ann
    eve.wait_for_url(world.address + "/login")
    assert "sent by another site" in eve.inner_text("main")
    eve.goto(world.address + "/")
    assert "eve" in eve.inner_text("header")
    site.shutdown()
    site.server_close()
