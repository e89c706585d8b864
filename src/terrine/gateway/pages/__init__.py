"""Pages for people: rendered here, filled in by templates, without a build step or anything from elsewhere.

A page is a route like any other, with a policy (`page=True`): its caller comes from the login's cookie, forms carry
`csrf`, and what is refused is shown as a page. Pages ask the same services as the API and check nothing themselves.
Styles and the one script lie in `static/`: the content security policy allows nothing inline and nothing from
elsewhere. Without scripts every page works; with them the price appears as one types.

| module | pages |
|---|---|
| `logins` | login, logout, styles and the script |
| `reading` | data sets, requests, spending, the access log |
| `playground` | a question: price, made-up rows, ask |
| `trainings` | a training: price, submit; a run's report |
| `deciding` | approve, deny, take back, go on |
| `lending` | register, lend, revoke, tokens |
| `forms` | what forms send, as the API's bodies |
| `rendering`, `wording` | templates and their filters; numbers in plain words |
"""

from fastapi import APIRouter

from terrine.gateway.pages import deciding, lending, logins, playground, reading, trainings
from terrine.gateway.pages.rendering import problem, unknown_address
from terrine.gateway.policy import GuardedRoute

router = APIRouter(route_class=GuardedRoute)
for _part in (logins, reading, playground, trainings, deciding, lending):
    router.routes.extend(_part.router.routes)

__all__ = ["problem", "router", "unknown_address"]
