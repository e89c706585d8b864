"""Pages in a real browser: a question, a decision; keyboard, phone, screen reader. Skipped without chromium."""

import re

import pytest

from tests import chromium
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, done
from tests.gateway.pages_in_chromium import CHECKS, CONTROLS, FOCUSED, serving

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = chromium.wanted
WIDE, PHONE = {"width": 1200, "height": 800}, {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as found:
        started = found.chromium.launch(executable_path=chromium.CHROMIUM, args=list(chromium.FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    found = made.Clinic(tmp_path_factory.mktemp("pages"), {"hosts": ["testserver", "127.0.0.1"]})
    done(found.owner.post("/datasets/visits", json=made.VISITS))
    found.lend("ann")
    found.lend("bob", allowance=0.0)
    found.lend("eve", role="officer")
    [found.mine] = [done(found.client("ann").post("/datasets/visits/ask", json=COUNT | {"purpose": "weekly"}))]
    told = COUNT | {"reason": "for the yearly report"}
    found.waits = found.client("bob").post("/datasets/visits/ask", json=told).json()["request"]
    with serving(found.app) as found.address:
        yield found
    found.close()


@pytest.fixture(scope="module")
def contexts(browser, world):
    """A browser's context for everyone, logged in once."""
    kept = {}

    def of(name, **options):
        if (name, *options) not in kept:
            context = kept[(name, *options)] = browser.new_context(base_url=world.address, **options)
            page = context.new_page()
            page.goto("/login")
            page.fill("#token", world.tokens[name])
            page.press("#token", "Enter")
            page.wait_for_url(world.address + "/")
            page.close()
        return kept[(name, *options)]

    yield of
    for context in kept.values():
        context.close()


@pytest.fixture
def as_(contexts):
    """Pages of people; what the browser complained about is an error."""
    pages, said = [], []

    def opened(name, size=WIDE, **options):
        page = contexts(name, **options).new_page()
        pages.append(page)
        page.set_viewport_size(size)
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda one: said.append(one.text) if "Content Security Policy" in one.text else None)
        page.goto("/")
        return page

    yield opened
    for page in pages:
        page.close()
    assert said == []


def test_an_analyst_types_a_question_tries_it_and_asks(world, as_):
    page = as_("ann")
    page.click("text=Ask a question")
    page.fill("#sql", "SELECT AVG(cost) AS mean FROM visits")
    page.fill("#epsilon", "0.25")
    page.wait_for_selector("#price .problem")  # a mean wants bounds
    page.fill("#bounds", "cost = 0, 1000")
    page.wait_for_selector("#price .big")
    assert "0.25" in page.inner_text("#price")
    assert "56.3%" in page.inner_text("#price")
    page.click("text=Try on made-up rows")
    page.wait_for_selector("#mock table")
    before = world.spent()
    page.fill("#purpose", "what a visit costs")
    page.click("text=Ask and pay")
    page.wait_for_selector("text=Charged, then answered")
    assert re.search(r"\d ± \d", page.inner_text("main table"))
    assert world.spent() == before + 1
    page.reload()  # does not ask again
    assert world.spent() == before + 1


@pytest.mark.slow
def test_an_officer_decides_on_a_phone(world, as_):
    told = COUNT | {"epsilon": 0.05, "reason": "for the board"}
    request = world.client("bob").post("/datasets/visits/ask", json=told).json()["request"]
    page = as_("eve", PHONE)
    page.click("text=See them")
    page.click(f"a[href='/pages/requests/{request}']")
    page.click("text=Approve and charge")  # without a reason: the browser asks for it
    assert page.evaluate("document.activeElement.id") == "reason"
    page.fill("#reason", "agreed")
    page.click("text=Approve and charge")
    page.wait_for_selector("text=Approved: it was charged")
    assert "agreed" in page.inner_text("main")
    with page.expect_download() as found:
        page.goto("/pages/datasets/visits/spending")
        page.click("text=Download the export")
    assert found.value.suggested_filename == "visits.jsonl"


def pages_of(world):
    waits, mine = f"/pages/requests/{world.waits}", f"/pages/requests/{world.mine['request']}"
    return {
        "ann": ("/", "/pages/datasets/visits", "/pages/datasets/visits/ask", "/pages/requests", mine, "/nowhere"),
        "eve": ("/", waits, "/pages/datasets/visits/spending", "/pages/datasets/visits/members", "/pages/log"),
        "owner": ("/pages/register", "/pages/datasets/visits/members"),
    }


@pytest.mark.parametrize("name", ["ann", "eve", "owner"])
def test_every_page_can_be_used_by_everybody(world, as_, name):
    page, wrong = as_(name), {}
    for path in pages_of(world)[name]:
        page.goto(path)
        for size in (WIDE, PHONE):
            page.set_viewport_size(size)
            if found := page.evaluate(CHECKS):
                wrong[path, size["width"]] = found
    assert wrong == {}


def test_the_checks_see_what_is_wrong(browser):
    page = browser.new_page(viewport=PHONE)
    page.set_content(
        "<h2>x</h2><p style='color:#bbb'>faint</p><input name=a><table><tr><th>h</th></tr></table><button></button>"
        "<div style='width:900px'>wide</div>"
    )
    said = " ".join(page.evaluate(CHECKS))
    for one in (
        "no language",
        "1 h1",
        "1 main",
        "skips",
        "no label",
        "caption",
        "scope",
        "no name",
        "contrast",
        "wider",
    ):
        assert one in said, one
    page.close()


@pytest.mark.slow
def test_the_keyboard_reaches_every_control_and_one_sees_where_it_is(world, as_):
    page = as_("ann")
    for path in ("/pages/datasets/visits/ask", "/pages/requests"):
        page.goto(path)
        if path.endswith("/ask"):
            page.wait_for_selector("#price .big")  # the price of the question that stands there at first
        wanted = page.evaluate(CONTROLS)
        page.evaluate("document.activeElement.blur()")
        reached = []
        for _ in wanted:
            page.keyboard.press("Tab")
            place, seen = page.evaluate(FOCUSED)
            assert seen, place
            reached.append(place)
        assert reached == wanted, path  # all of them, in the order in which they are read
    page.goto("/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.slow
def test_without_scripts_everything_works(world, as_):
    page = as_("ann", java_script_enabled=False)
    page.goto("/pages/datasets/visits/ask")
    page.fill("#sql", "SELECT COUNT(*) AS n FROM visits")
    page.fill("#epsilon", "0.07")
    page.click("text=Show the price")
    assert "0.07" in page.inner_text("#price")
    page.click("text=Try on made-up rows")
    assert "Made-up rows" in page.inner_text("#mock")
    page.click("text=Ask and pay")
    assert "Charged, then answered" in page.inner_text("main")
    page.click("text=Log out")
    assert page.url.endswith("/login")


def test_after_logging_out_going_back_shows_nothing(world, as_):
    page = as_("ann", locale="en-GB")  # a login of its own
    page.goto("/pages/requests")
    page.click("text=Log out")
    page.wait_for_url("**/login")
    page.go_back()
    page.wait_for_url("**/login")
    assert "visits" not in page.content()
