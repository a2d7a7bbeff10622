// Asks the server again whenever a field moves, and shows what a search does.
// The page is the same without it: every question is a plain form.
"use strict";

const form = document.getElementById("form");
const status = document.getElementById("status");
const PLAN = ["tp", "pp", "cp", "ep", "zero", "recompute", "mbs", "schedule", "vp", "layers", "sp",
  "cp_method", "etp", "rep", "offload"];
const LIVE = document.body.dataset.task === "price";
let asked = 0;
let abort = new AbortController();

function query() {
  const given = new URLSearchParams(new FormData(form));
  for (const [name, value] of [...given]) if (!value.trim()) given.delete(name);
  return given.toString();
}

// The parts of the plan that were left open stay at the values they have, so that one move
// changes one thing (and nothing is searched).
function hold(moved) {
  const chosen = document.getElementById("chosen");
  if (!chosen || ["model", "config", "cluster", "software"].includes(moved)) return;
  for (const name of PLAN) {
    const field = form.elements[name];
    if (field.value || name === moved) continue;
    const value = chosen.getAttribute("data-" + name.replaceAll("_", "-")) || "";
    if (!value) continue;
    if (field.tagName === "SELECT" && ![...field.options].some((one) => one.value === value)) continue;
    field.value = value;
  }
}

// A degree that has an effect only together with another one is dropped with it.
function release(moved) {
  const with_ = { pp: ["schedule", "vp"], tp: ["sp", "etp"], cp: ["cp_method"] };
  for (const name of with_[moved] || []) form.elements[name].value = "";
}

function follow() {
  for (const slider of document.querySelectorAll(".slider")) {
    const field = document.getElementById(slider.dataset.for);
    slider.hidden = false;
    const value = Number(field.value || field.placeholder);
    if (value > 0) slider.value = Math.round(Math.log2(value));
    slider.setAttribute("aria-valuetext", field.value || field.placeholder);
  }
}

async function ask(moved) {
  const number = ++asked;
  abort.abort();
  abort = new AbortController();
  const answer = document.getElementById("answer");
  answer.setAttribute("aria-busy", "true");
  const address = "/?" + query();
  const whole = ["model", "config", "cluster"].includes(moved);
  try {
    const headers = whole ? {} : { "X-Part": "answer" };
    const response = await fetch(address, { signal: abort.signal, headers });
    const text = await response.text();
    if (number !== asked) return;
    const page = new DOMParser().parseFromString(text, "text/html");
    const found = page.getElementById("answer");
    if (!found) throw new Error(text);
    const open = [...answer.querySelectorAll("details")].map((one) => one.open);
    answer.replaceWith(found);
    found.querySelectorAll("details").forEach((one, place) => { one.open = Boolean(open[place]); });
    if (whole) {
      document.getElementById("plan").replaceWith(page.getElementById("plan"));
    }
    const nav = page.querySelector("nav");
    document.querySelector("nav").replaceWith(nav);
    document.title = page.title;
    history.replaceState(null, "", address);
    status.textContent = page.getElementById("status").textContent;
    follow();
  } catch (error) {
    if (error.name === "AbortError" || number !== asked) return;
    answer.setAttribute("aria-busy", "false");
    const words = document.createElement("p");
    words.className = "error";
    words.setAttribute("role", "alert");
    words.textContent = "the server does not answer; is shardplan serve still running?";
    answer.replaceChildren(words);
  }
}

let timer = 0;
function soon(moved, wait) {
  clearTimeout(timer);
  timer = setTimeout(() => ask(moved), wait);
}

form.addEventListener("input", (event) => {
  const field = event.target;
  if (field.classList.contains("slider")) {
    const text = document.getElementById(field.dataset.for);
    text.value = String(2 ** Number(field.value));
    field.setAttribute("aria-valuetext", text.value);
    if (!LIVE) return;
    hold(text.name);
    soon(text.name, 30);
  } else if (LIVE && field.tagName === "SELECT" && field.name !== "objective") {
    if (field.value) { hold(field.name); release(field.name); }
    soon(field.name, 0);
  }
});
form.addEventListener("change", (event) => {
  const field = event.target;
  if (!LIVE || field.tagName === "SELECT" || field.classList.contains("slider")) return;
  if (["objective", "require", "keep", "clusters"].includes(field.name)) return;
  if (["seq_len", "batch"].includes(field.name)) hold(field.name);
  soon(field.name, 0);
});

// A search: its activity until the answer is there, then the page of the answer.
function search(path, address) {
  const answer = document.getElementById("answer");
  const words = document.createElement("p");
  const bar = document.createElement("progress");
  const stop = document.createElement("button");
  bar.setAttribute("aria-label", "searching");
  words.textContent = "searching";
  stop.type = "button";
  stop.textContent = "Stop";
  answer.replaceChildren(bar, words, stop);
  answer.focus();
  status.textContent = "searching";
  const task = path.slice(1);
  const source = new EventSource("/activity/" + task + "?" + address);
  source.addEventListener("activity", (event) => {
    const now = JSON.parse(event.data);
    const left = now.left === null ? "" : `, ${now.left} left`;
    words.textContent = `${now.text} … ${now.seconds.toFixed(0)} s${left}`;
    if (now.share === null) bar.removeAttribute("value");
    else bar.value = now.share;
  });
  source.addEventListener("done", () => {
    source.close();
    location.assign(path + "?" + address);
  });
  source.addEventListener("error", () => {
    source.close();
    location.assign(path + "?" + address);
  });
  stop.addEventListener("click", () => {
    source.close();
    words.textContent = "stopped";
    status.textContent = "stopped";
    bar.remove();
    stop.remove();
  });
}

form.addEventListener("submit", (event) => {
  const path = event.submitter ? new URL(event.submitter.formAction).pathname : "/";
  event.preventDefault();
  if (path === "/") location.assign("/?" + query());
  else search(path, query());
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-search]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const address = new URL(link.href);
  search(address.pathname, address.search.slice(1));
});

// A text that was changed while the page was loading, before this script listened.
for (const field of form.elements) {
  if (field === document.activeElement || !("defaultValue" in field)) continue;
  if (field.type !== "range" && field.value !== field.defaultValue) {
    field.dispatchEvent(new Event("change", { bubbles: true }));
  }
}
follow();
