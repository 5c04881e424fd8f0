// What the pages do in the browser beside htmx: times, light and dark, messages, and being quiet in hidden tabs.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);

  // ---- times, in the reader's own clock

  const STEPS = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [Infinity, 86400, "d"]];
  const span = (seconds) => {
    const [, length, unit] = STEPS.find(([below]) => seconds < below);
    return `${Math.floor(seconds / length)} ${unit}`;
  };
  const relative = (at) => {
    const seconds = (Date.now() - at.getTime()) / 1000;
    if (Math.abs(seconds) < 2) return "now";
    return seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
  };
  const wallClock = (at) => {
    const today = new Date().toDateString() === at.toDateString();
    const time = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
    return at.toLocaleString(undefined, today ? time : { month: "short", day: "numeric", ...time });
  };
  const showTimes = (root) => {
    for (const element of root.querySelectorAll("time[data-as]")) {
      const at = new Date(element.dateTime);
      element.textContent = element.dataset.as === "ago" ? relative(at) : wallClock(at);
      element.title = at.toLocaleString();
    }
  };

  // ---- light and dark

  const toggleTheme = () => {
    const root = document.documentElement;
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    document.cookie = `theme=${root.dataset.theme}; path=/; max-age=31536000; samesite=strict`;
  };

  // ---- what is said to the person

  const say = (text, tone) => {
    const line = document.createElement("p");
    line.textContent = text;
    line.className = tone;
    byId("said").append(line);
    setTimeout(() => line.remove(), tone === "bad" ? 12000 : 5000);
  };
  const saidIn = (xhr) => decodeURIComponent(xhr.getResponseHeader("x-said") || "");

  // A service that does not answer is said in a banner; what was last known stays on the page.
  let silentSince = null;
  const fail = (why) => {
    silentSince ??= new Date();
    byId("banner").textContent = `${why} What you see is from ${silentSince.toLocaleTimeString()}; trying again.`;
    byId("banner").hidden = false;
  };
  const recover = () => {
    silentSince = null;
    byId("banner").hidden = true;
  };

  // ---- htmx

  const isPoll = (element) => element.hasAttribute("data-live");
  const tags = new WeakMap();

  document.addEventListener("htmx:beforeRequest", (event) => {
    if (isPoll(event.detail.elt) && document.hidden) event.preventDefault();
  });
  document.addEventListener("htmx:beforeSwap", (event) => {
    // A part that has not changed, or in which somebody types or selects, is left alone.
    const { xhr, elt, target } = event.detail;
    const tag = xhr.getResponseHeader("etag");
    if (!isPoll(elt) || !tag) return;
    if (tags.get(target) === tag || isInUse(target)) {
      event.detail.shouldSwap = false;
      return;
    }
    tags.set(target, tag);
    keepView(target);
  });
  document.addEventListener("htmx:afterSwap", (event) => showTimes(event.detail.target));
  document.addEventListener("htmx:afterRequest", (event) => {
    const { xhr, successful, elt } = event.detail;
    if (successful) {
      recover();
      const said = saidIn(xhr);
      if (said) say(said, "good");
      if (xhr.status === 204) document.body.dispatchEvent(new Event("anew"));
    } else if (xhr.status >= 500) {
      fail(saidIn(xhr) || "The service does not answer.");
    } else if (xhr.status && !isPoll(elt)) {
      say(saidIn(xhr) || `That did not work (${xhr.status}).`, "bad");
    }
  });
  document.addEventListener("htmx:sendError", () => fail("The service cannot be reached."));
  document.addEventListener("htmx:timeout", () => fail("The service does not answer."));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) document.body.dispatchEvent(new Event("anew"));
  });

  const isInUse = (target) => {
    const typing = target.contains(document.activeElement) && document.activeElement.matches("input,select,textarea");
    const selection = getSelection();
    return typing || (!selection.isCollapsed && target.contains(selection.anchorNode));
  };

  // What was opened stays open, and a log that is read at its end stays at its end.
  const keepView = (target) => {
    const open = [...target.querySelectorAll("details")].map((details) => details.open);
    const log = target.querySelector("pre.log");
    const atEnd = log && log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    const top = log && log.scrollTop;
    target.addEventListener("htmx:afterSwap", () => {
      target.querySelectorAll("details").forEach((details, k) => { if (open[k]) details.open = true; });
      const next = target.querySelector("pre.log");
      if (next && log) next.scrollTop = atEnd ? next.scrollHeight : top;
    }, { once: true });
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-copy]");
    if (button) {
      navigator.clipboard.writeText(button.dataset.copy).then(() => say("Copied.", "good"), () => say("Copying is not allowed here.", "bad"));
    }
  });

  document.addEventListener("DOMContentLoaded", () => {
    showTimes(document);
    setInterval(() => showTimes(document), 10000);
    byId("theme").addEventListener("click", toggleTheme);
    for (const log of document.querySelectorAll("pre.log")) log.scrollTop = log.scrollHeight;
  });
})();
