"use strict";
// Keeps a live page up to date: loads it again when the server reports that its files have changed, and puts its new
// content in place of the old. Controls, ticks, unfolded parts and scrolled tables stay as they are.
(function () {
  const GAP_MS = 1000;  // between two loads at least
  let isBusy = false, isStale = false;

  function say(text) {
    const place = document.getElementById("live");
    if (place) { place.textContent = text; place.className = text; }
  }

  function keep(fresh) {
    const controls = document.getElementById("controls"), place = fresh.getElementById("controls");
    if (controls && place) place.replaceWith(controls);
    const copy = (selector, take) => {
      const after = fresh.querySelectorAll(selector);
      document.querySelectorAll(selector).forEach((each, index) => { if (after[index]) take(each, after[index]); });
    };
    copy("main details", (before, after) => { after.open = before.open; });
    document.querySelectorAll("main input[name=run]:checked").forEach(before => {
      fresh.querySelectorAll("main input[name=run]").forEach(after => { if (after.value === before.value) after.checked = true; });
    });
  }

  function replace(fresh) {
    if (!fresh.querySelector("main")) return;
    const tables = [...document.querySelectorAll(".scroll")].map(each => [each.scrollLeft, each.scrollTop]);
    const focus = document.activeElement, top = scrollY;
    keep(fresh);
    document.title = fresh.title;
    document.querySelector("main").replaceWith(fresh.querySelector("main"));
    const data = document.getElementById("data"), next = fresh.getElementById("data");
    if (data && next) { data.textContent = next.textContent; document.dispatchEvent(new Event("data")); }
    document.querySelectorAll(".scroll").forEach((each, index) => {
      if (tables[index]) [each.scrollLeft, each.scrollTop] = tables[index];
    });
    if (focus && focus.isConnected) focus.focus({ preventScroll: true });
    scrollTo(scrollX, top);
  }

  async function load() {
    if (isBusy) { isStale = true; return; }
    isBusy = true;
    isStale = false;
    try {
      const answer = await fetch(location.href, { cache: "no-store", credentials: "same-origin" });
      if (answer.ok) replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
      say(answer.ok ? "live" : "stale");
    } catch { say("stale"); }
    setTimeout(() => { isBusy = false; if (isStale) load(); }, GAP_MS);
  }

  const stream = new EventSource(document.body.dataset.stream);
  let seen = document.body.dataset.version;
  stream.addEventListener("change", event => { if (event.data !== seen) { seen = event.data; load(); } });
  stream.addEventListener("open", () => say("live"));
  stream.addEventListener("error", () => say("stale"));
})();
