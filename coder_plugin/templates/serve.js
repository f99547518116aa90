// The page of coder-plugin serve. Texts of the index and of users are set as text, never as HTML.
"use strict";

const PAGE = 24; // results that are asked for at first, and more each time
const by = (id) => document.getElementById(id);
const state = { query: null, k: PAGE, info: null, running: null };

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
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

function among() {
  const chosen = document.querySelector('input[name="among"]:checked');
  return chosen ? chosen.value : state.info.among[0];
}

// The values that results must have, by column.
function filters() {
  const chosen = Object.create(null);
  for (const field of document.querySelectorAll("[data-column]")) {
    if (field.value) chosen[field.dataset.column] = field.tagName === "SELECT" ? JSON.parse(field.value) : field.value;
  }
  return chosen;
}

// A list of a column's values, or a field to type one where there are too many.
function filter({ name, values }) {
  const label = element("label", "filter");
  label.append(element("span", "", name.replaceAll("_", " ")));
  const field = element(values ? "select" : "input");
  field.dataset.column = name;
  if (values) {
    field.append(new Option("any", ""));
    for (const value of values) field.append(new Option(value === "" ? "(empty)" : String(value), JSON.stringify(value)));
  } else Object.assign(field, { type: "text", placeholder: "any", maxLength: 200 });
  field.addEventListener("change", () => again({ filters: filters() }));
  label.append(field);
  return label;
}

// Ask the server; throws an Error with the server's own words.
async function ask(query, k, signal) {
  const options = { method: "POST", signal };
  if (query.picture) {
    options.body = new FormData();
    options.body.append("picture", query.picture);
    options.body.append("k", k);
    options.body.append("among", query.among);
    options.body.append("filters", JSON.stringify(query.filters));
  } else {
    const { text, key } = query;
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify({ text, key, k, among: query.among, filters: query.filters });
  }
  const answer = await fetch("api/search", options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.detail || `the server answered with status ${answer.status}`);
  return content.results;
}

async function search(query, { k = PAGE, remember = true } = {}) {
  if (query.picture && query.picture.size > state.info.most_bytes) {
    show(query);
    clearResults();
    say(`This picture has over ${Math.floor(state.info.most_bytes / 2 ** 20)} MB: choose a smaller one.`, true);
    return;
  }
  if (state.running) state.running.abort();
  const running = (state.running = new AbortController());
  const further = k > PAGE && state.query === query;
  Object.assign(state, { query, k });
  show(query);
  if (remember) history.pushState(null, "", address(query));
  by("empty").hidden = true;
  by("results").setAttribute("aria-busy", "true");
  say("Searching …");
  try {
    const results = await ask(query, k, running.signal);
    const first = further ? by("results").children.length : 0;
    list(results, query.among);
    const all = query.among === "images" ? state.info.images : state.info.captions;
    by("more").hidden = results.length < k || k >= Math.min(state.info.most_results, all);
    const what = { images: ["picture", "pictures"], captions: ["caption", "captions"] }[query.among][Number(results.length !== 1)];
    const of = Object.keys(query.filters).length ? "" : ` of ${all.toLocaleString("en")}`;
    say(results.length ? `${results.length}${of} ${what}, the best first` : "Nothing found.");
    if (further && by("results").children[first]) by("results").children[first].querySelector("a").focus();
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
  by("more").hidden = true;
  by("empty").hidden = true;
}

// What is searched for, where it is not the text in the box.
function show(query) {
  const old = by("shown").src;
  if (old.startsWith("blob:")) URL.revokeObjectURL(old);
  by("text").value = query.text || "";
  by("query").hidden = !query.picture && !query.key;
  by("shown").hidden = true;
  if (query.picture) {
    by("shown").src = URL.createObjectURL(query.picture);
    by("named").replaceChildren("Like the picture ", ...named(query.picture.name || ""));
  } else if (query.key) {
    by("shown").removeAttribute("src");
    if (query.thumbnail) by("shown").src = query.thumbnail;
    by("named").replaceChildren("Like ", ...named(query.key));
  }
  const radio = document.querySelector(`input[name="among"][value="${query.among}"]`);
  if (radio) radio.checked = true;
}

function list(results, kind) {
  by("results").classList.toggle("texts", kind === "captions");
  by("results").replaceChildren(...results.map(card));
}

function card(result) {
  const item = element("li", "hit");
  const caption = result.text === null ? result.captions[0] || "" : result.text;
  const link = element("a");
  Object.assign(link, { href: result.image, target: "_blank", rel: "noopener", title: "Open the picture" });
  const frame = element("span", "picture");
  const picture = element("img");
  Object.assign(picture, { alt: caption || result.key, loading: "lazy", decoding: "async" });
  picture.addEventListener("error", () => {
    frame.classList.add("none");
    frame.replaceChildren(...named(result.key));
  });
  picture.src = result.thumbnail;
  frame.append(picture);
  link.append(frame);
  const facts = element("div", "facts");
  const score = element("span", "score", (result.fused === null ? result.score : result.fused).toFixed(3));
  score.title = result.fused === null ? "Score" : `Score of re-ranking; of the first stage: ${result.score.toFixed(3)}`;
  facts.append(element("b", "", String(result.rank)), score);
  if (state.info.among.includes("images")) {
    const like = element("button", "like", "More like it");
    like.type = "button";
    like.addEventListener("click", () => more(result));
    facts.append(like);
  }
  item.more = () => more(result);
  item.append(link);
  const words = element("p", "caption", caption);
  const key = element("p", "key");
  key.append(...named(result.key));
  key.title = result.key;
  if (result.text !== null) item.append(words, facts, key);
  else item.append(facts, ...(caption ? [words] : []), key);
  return item;
}

function more(result) {
  if (!state.info.among.includes("images")) return;
  scrollTo({ top: 0 });
  search({ key: result.key, thumbnail: result.thumbnail, among: "images", filters: filters() });
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
  for (const field of document.querySelectorAll("[data-column]")) {
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

function searchPicture(file) {
  if (file && state.info && state.info.pictures) search({ picture: file, among: among(), filters: filters() });
}

// A new query of the same kind after another choice, such as captions in place of pictures.
function again(changes) {
  if (state.query) search({ ...state.query, ...changes });
}

function move(event) {
  const items = [...by("results").children];
  const here = items.findIndex((item) => item.contains(document.activeElement));
  if (event.key === "ArrowDown" && document.activeElement === by("text") && items.length) {
    event.preventDefault();
    items[0].querySelector("a").focus();
    return;
  }
  if (here < 0) return;
  if (event.key.toLowerCase() === "m" && !event.ctrlKey && !event.metaKey && !event.altKey) {
    items[here].more();
    return;
  }
  const columns = items.filter((item) => item.offsetTop === items[0].offsetTop).length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = here + step;
  if (next < 0) by("text").focus();
  else if (next < items.length) items[next].querySelector("a").focus();
}

function keys(event) {
  if (event.key === "/" && document.activeElement !== by("text")) {
    event.preventDefault();
    by("text").focus();
    by("text").select();
  } else if (event.key === "Escape") {
    event.preventDefault();
    if (document.activeElement !== by("text")) by("text").focus();
    else if (by("text").value || state.query) {
      reset();
      history.pushState(null, "", "#");
    } else by("text").blur();
  } else move(event);
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
  by("clear").addEventListener("click", () => {
    reset();
    history.pushState(null, "", "#");
    by("text").focus();
  });
  by("more").addEventListener("click", () =>
    search(state.query, { k: Math.min(state.k + PAGE, state.info.most_results), remember: false }));
  by("among").addEventListener("change", () => again({ among: among() }));
  addEventListener("keydown", keys);
  addEventListener("popstate", fromAddress);
  addEventListener("paste", (event) => searchPicture([...event.clipboardData.files].find((file) => file.type.startsWith("image/"))));
  let depth = 0;
  const files = (event) => event.dataTransfer && event.dataTransfer.types.includes("Files") && state.info.pictures;
  addEventListener("dragenter", (event) => files(event) && (by("drop").hidden = ++depth < 1));
  addEventListener("dragleave", (event) => files(event) && (by("drop").hidden = --depth < 1));
  addEventListener("dragover", (event) => files(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    depth = 0;
    by("drop").hidden = true;
    searchPicture(event.dataTransfer.files[0]);
  });
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
