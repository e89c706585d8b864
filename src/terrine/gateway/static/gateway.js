"use strict";

// The price appears as one types: the same form, sent to the same server, which answers with a part of the page.
// Without this script every page works; its buttons send the form.

const question = document.getElementById("question");

if (question) {
  const price = document.getElementById("price");
  const mock = document.getElementById("mock");
  let timer = 0;
  let running = null;

  const fetched = async (address, part, place, signal) => {
    const body = new URLSearchParams(new FormData(question));
    const answer = await fetch(address, { method: "POST", body, headers: { "x-fragment": part }, signal });
    if (answer.redirected || !answer.headers.get("x-part")) {
      place.textContent = answer.redirected ? "You were logged out: load the page again." : "The server could not say it now.";
      return;
    }
    place.innerHTML = await answer.text(); // rendered and escaped by the server
  };

  const priced = async () => {
    if (running) running.abort();
    running = new AbortController();
    if (!question.checkValidity()) return;
    price.setAttribute("aria-busy", "true");
    try {
      await fetched(question.dataset.price, "quote", price, running.signal);
      price.removeAttribute("aria-busy");
    } catch (error) {
      if (error.name === "AbortError") return;
      price.removeAttribute("aria-busy");
      price.textContent = "The server cannot be reached now.";
    }
  };

  question.addEventListener("input", (event) => {
    if (["purpose", "reason", "fresh"].includes(event.target.name)) return;
    clearTimeout(timer);
    timer = setTimeout(priced, 400);
  });
  question.addEventListener("submit", (event) => {
    const button = event.submitter;
    const action = button && button.getAttribute("formaction");
    if (mock && action === question.dataset.mock) {
      event.preventDefault();
      fetched(action, "mock", mock).catch(() => (mock.textContent = "The server cannot be reached now."));
    } else if (action === question.dataset.price) {
      event.preventDefault();
      priced();
    }
  });
  if (!price.querySelector(".big, .problem") && question.checkValidity()) priced();
}

// A form is sent once, however often its button is pressed.
for (const form of document.querySelectorAll("form[method=post]")) {
  form.addEventListener("submit", (event) => {
    if (event.defaultPrevented) return;
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
}

// What a logged-out person finds by going back is asked for again, and refused.
addEventListener("pageshow", (event) => {
  for (const form of document.querySelectorAll("form[data-sent]")) delete form.dataset.sent;
  if (event.persisted) location.reload();
});
