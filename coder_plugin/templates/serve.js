// The page of coder-plugin serve. Texts of the index and of users are set as text, never as HTML.
"use strict";

const PAGE = 24; // results that are asked for at first, and more each time
const by = (id) => document.getElementById(id);
const fields = () => [...document.querySelectorAll("[data-column]")];
const state = { query: null, k: PAGE, info: null, running: null };

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// A name with places for a line to break: after a slash, an underscore or a hyphen, and before the ending of a file's name.
function named(text) {
  const parts = text.split(/(?<=[/_=-])(?=[^/_=-])|(?=\.\w+$)/);
  return parts.flatMap((part, number) => (number ? [element("wbr"), part] : [part]));
}

function say(text, bad) {
  by("status").textContent = text;
  by("status").classList.toggle("bad", Boolean(bad));
}

const among = () => (document.querySelector('input[name="among"]:checked') || { value: state.info.among[0] }).value;

// The values that results must have, by column.
function filters() {
  const chosen = fields().filter((field) => field.value);
  return Object.fromEntries(chosen.map((field) =>
    [field.dataset.column, field.tagName === "SELECT" ? JSON.parse(field.value) : field.value]));
}

// A list of a column's values, or a field to type one where there are too many.
function filter({ name, values }) {
  const field = values ? element("select", {}, new Option("any", "")) : element("input", { type: "text", placeholder: "any", maxLength: 200 });
  for (const value of values || []) field.append(new Option(value === "" ? "(empty)" : String(value), JSON.stringify(value)));
  field.dataset.column = name;
  field.addEventListener("change", () => again({ filters: filters() }));
  return element("label", { className: "filter" }, element("span", {}, name.replaceAll("_", " ")), field);
}

// Ask the server; throws an Error with the server's own words.
async function ask({ picture, text, key, ...others }, k, signal) {
  const options = { method: "POST", signal };
  if (picture) {
    options.body = new FormData();
    const values = { picture, k, among: others.among, filters: JSON.stringify(others.filters) };
    for (const [name, value] of Object.entries(values)) options.body.append(name, value);
  } else {
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify({ text, key, k, among: others.among, filters: others.filters });
  }
  const answer = await fetch(picture ? "api/picture" : "api/search", options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.detail || `the server answered with status ${answer.status}`);
  return content.results;
}

async function search(query, { k = PAGE, remember = true } = {}) {
  show(query);
  if (query.picture && query.picture.size > state.info.most_bytes) {
    clearResults();
    say(`This picture has over ${Math.floor(state.info.most_bytes / 2 ** 20)} MB: choose a smaller one.`, true);
    return;
  }
  if (state.running) state.running.abort();
  const running = (state.running = new AbortController());
  const first = k > PAGE && state.query === query ? by("results").children.length : 0;
  Object.assign(state, { query, k });
  if (remember) history.pushState(null, "", address(query));
  by("empty").hidden = true;
  by("results").setAttribute("aria-busy", "true");
  say("Searching …");
  try {
    const results = await ask(query, k, running.signal);
    by("results").classList.toggle("texts", query.among === "captions");
    by("results").replaceChildren(...results.map(card));
    const all = query.among === "images" ? state.info.images : state.info.captions;
    by("more").hidden = results.length < k || k >= Math.min(state.info.most_results, all);
    const what = (query.among === "images" ? "picture" : "caption") + (results.length === 1 ? "" : "s");
    const of = Object.keys(query.filters).length ? "" : ` of ${all.toLocaleString("en")}`;
    say(results.length ? `${results.length}${of} ${what}, the best first` : "Nothing found.");
    if (first && results.length > first) focus(first);
  } catch (error) {
    if (error.name === "AbortError") return;
    clearResults();
    const text = error instanceof TypeError ? "The server does not answer: is it still running?" : `${error.message}.`;
    say(text[0].toUpperCase() + text.slice(1), true);
  } finally {
    if (state.running === running) {
      state.running = null;
      by("results").removeAttribute("aria-busy");
    }
  }
}

function clearResults() {
  by("results").replaceChildren();
  by("more").hidden = by("empty").hidden = true;
}

// What is searched for, where it is not the text in the box.
function show(query) {
  if (by("shown").src.startsWith("blob:")) URL.revokeObjectURL(by("shown").src);
  by("shown").removeAttribute("src");
  by("shown").hidden = true;
  by("text").value = query.text || "";
  by("query").hidden = !query.picture && !query.key;
  if (query.picture) by("shown").src = URL.createObjectURL(query.picture);
  else if (query.thumbnail) by("shown").src = query.thumbnail;
  by("named").replaceChildren(query.picture ? "Like the picture " : "Like ", ...named(query.key || (query.picture || {}).name || ""));
  const radio = document.querySelector(`input[name="among"][value="${query.among}"]`);
  if (radio) radio.checked = true;
}

function card(result) {
  const caption = result.text === null ? result.captions[0] || "" : result.text;
  const picture = element("img", { alt: caption || result.key, loading: "lazy", decoding: "async" });
  const frame = element("span", { className: "picture" }, picture);
  picture.addEventListener("error", () => {
    frame.classList.add("none");
    frame.replaceChildren(...named(result.key));
  });
  picture.src = result.thumbnail;
  const link = element("a", { href: result.image, target: "_blank", rel: "noopener", title: "Open the picture" }, frame);
  const title = result.fused === null ? "Score" : `Score of re-ranking; of the first stage: ${result.score.toFixed(3)}`;
  const score = element("span", { className: "score", title }, (result.fused ?? result.score).toFixed(3));
  const facts = element("div", { className: "facts" }, element("b", {}, String(result.rank)), score);
  const more = () => {
    scrollTo({ top: 0 });
    search({ key: result.key, thumbnail: result.thumbnail, among: "images", filters: filters() });
  };
  const likes = state.info.among.includes("images");
  if (likes) facts.append(element("button", { className: "like", type: "button", onclick: more }, "More like it"));
  const words = caption ? [element("p", { className: "caption" }, caption)] : [];
  const key = element("p", { className: "key", title: result.key }, ...named(result.key));
  const parts = result.text !== null ? [...words, facts, key] : [facts, ...words, key];
  return element("li", { className: "hit", more: likes ? more : () => {} }, link, ...parts);
}

// The address of a query, so that it can be passed on and gone back to. A picture's is that of the page.
function address(query) {
  const parts = new URLSearchParams();
  if (query.picture) return "#";
  for (const name of ["text", "key", "among"]) if (query[name]) parts.set(name, query[name]);
  for (const [name, value] of Object.entries(query.filters)) parts.set(`filters.${name}`, JSON.stringify(value));
  return `#${parts}`;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return "";
  }
}

function fromAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const [text, key] = [parts.get("text"), parts.get("key")];
  const kind = state.info.among.includes(parts.get("among")) ? parts.get("among") : state.info.among[0];
  for (const field of fields()) {
    const value = parts.get(`filters.${field.dataset.column}`) || "";
    field.value = field.tagName === "SELECT" ? value : parsed(value);
  }
  if (text || key) search({ [text ? "text" : "key"]: text || key, among: kind, filters: filters() }, { remember: false });
  else reset();
}

function reset() {
  if (state.running) state.running.abort();
  state.query = null;
  show({ among: among() });
  clearResults();
  by("empty").hidden = false;
  say("");
}

function forget() {
  reset();
  history.pushState(null, "", "#");
  by("text").focus();
}

function searchPicture(file) {
  if (file && state.info && state.info.pictures) search({ picture: file, among: among(), filters: filters() });
}

// A new query of the same kind after another choice, such as captions in place of pictures.
function again(changes) {
  if (state.query) search({ ...state.query, ...changes });
}

const focus = (number) => by("results").children[number].querySelector("a").focus();

function keys(event) {
  const typing = event.target instanceof Element && event.target.closest("input, select");
  const items = [...by("results").children];
  const here = items.findIndex((item) => item.contains(document.activeElement));
  const columns = items.filter((item) => item.offsetTop === items[0].offsetTop).length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/" && !typing) by("text").select();
  else if (event.key === "Escape" && event.target !== by("text")) by("text").focus();
  else if (event.key === "Escape" && (by("text").value || state.query)) forget();
  else if (event.key === "Escape") by("text").blur();
  else if (event.key === "ArrowDown" && event.target === by("text") && items.length) focus(0);
  else if (event.key.toLowerCase() === "m" && here >= 0) items[here].more();
  else if (step && here >= 0 && here + step < 0) by("text").focus();
  else if (step && here >= 0 && here + step < items.length) focus(here + step);
  else return;
  event.preventDefault();
}

function listen() {
  by("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = by("text").value.trim();
    if (text) search({ text, among: among(), filters: filters() });
    else say("Type what to find first.");
  });
  by("pick").addEventListener("click", () => by("file").click());
  by("file").addEventListener("change", () => {
    searchPicture(by("file").files[0]);
    by("file").value = ""; // the same file can be chosen again
  });
  by("shown").addEventListener("load", () => (by("shown").hidden = false));
  by("clear").addEventListener("click", forget);
  by("more").addEventListener("click", () =>
    search(state.query, { k: Math.min(state.k + PAGE, state.info.most_results), remember: false }));
  by("among").addEventListener("change", () => again({ among: among() }));
  addEventListener("keydown", keys);
  addEventListener("popstate", fromAddress);
  addEventListener("paste", (event) => searchPicture([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      if (!state.info.pictures || !event.dataTransfer || !event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      by("drop").hidden = kind === "drop" || (kind === "dragleave" && !event.relatedTarget);
      if (kind === "drop") searchPicture(event.dataTransfer.files[0]);
    });
  }
}

async function start() {
  try {
    const answer = await fetch("api/info");
    if (!answer.ok) throw new Error();
    state.info = await answer.json();
  } catch {
    say("The server does not answer: is it still running? Load the page again.", true);
    return;
  }
  const { images, captions, model, objective } = state.info;
  const sizes = `${images.toLocaleString("en")} pictures, ${captions.toLocaleString("en")} captions`;
  by("about").textContent = [sizes, model && `model ${model}`, objective].filter(Boolean).join(" · ");
  by("version").textContent = state.info.version;
  by("text").maxLength = state.info.most_text;
  by("pick").hidden = by("with-picture").hidden = !state.info.pictures;
  by("among").hidden = state.info.among.length < 2;
  document.querySelector(`input[name="among"][value="${state.info.among[0]}"]`).checked = true;
  by("options").append(...state.info.filters.map(filter));
  listen();
  fromAddress();
}

start();
