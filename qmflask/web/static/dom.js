// Builds elements. Text only ever becomes text: nothing here parses HTML, so names and logs cannot inject any.

/** h("p.soft", {title: "x", onclick: f}, "text", child, ...): an element; null and false children are left out. */
export function h(spec, ...rest) {
  const [tag, ...classes] = spec.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  let children = rest;
  const first = rest[0];
  if (first && typeof first === "object" && !(first instanceof Node) && !Array.isArray(first)) {
    setAll(element, first);
    children = rest.slice(1);
  }
  put(element, children);
  return element;
}

function setAll(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.startsWith("aria") && name !== "list" && name !== "form") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
}

function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  put(element, children);
  return element;
}

/** Set text only when it differs, so that a selection or a screen reader is not disturbed. */
export function say(element, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
  return element;
}

/** Replace children only when `key` differs from the last time: what a click or focus is on stays where it is. */
export function once(element, key, make) {
  const wanted = JSON.stringify(key);
  if (element.dataset.key === wanted) return;
  element.dataset.key = wanted;
  fill(element, make());
}

/** Keep one child per item, in order; `make(item)` gives {element, update(item)}. Elements survive updates. */
export class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.parts = new Map();
  }

  update(items, keyOf) {
    const seen = new Set();
    let place = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      seen.add(key);
      let part = this.parts.get(key);
      if (!part) this.parts.set(key, (part = this.make(item)));
      part.update(item);
      if (part.element === place) place = place.nextElementSibling;
      else this.parent.insertBefore(part.element, place);
    }
    for (const [key, part] of this.parts) {
      if (!seen.has(key)) {
        part.element.remove();
        this.parts.delete(key);
      }
    }
  }
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  put(element, children);
  return element;
}

/** A short message in the corner. */
export function toast(text, bad = false) {
  const box = document.getElementById("toasts");
  const note = h(bad ? "div.toast.bad" : "div.toast", text);
  box.append(note);
  while (box.children.length > 4) box.firstElementChild.remove();
  setTimeout(() => note.remove(), bad ? 9000 : 4000);
}
