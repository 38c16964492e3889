// Elements are made here, and texts only ever become text: no markup is parsed anywhere.

/**
 * @typedef {Node | string} Child
 * @typedef {Record<string, string | number | boolean | EventListener | undefined>} Props
 */

/**
 * Make an element.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Props} [props] attributes; functions are listeners of the event of their name
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  apply(made, props);
  made.append(...children);
  return made;
}

/**
 * Make an element of a drawing.
 *
 * @param {string} tag
 * @param {Props} [props]
 * @param {...Child} children
 */
export function svg(tag, props = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  apply(made, props);
  made.append(...children);
  return made;
}

/** @param {Element} element @param {Props} props */
function apply(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, String(value));
  }
}

/**
 * Find the one element that a page or a form must have.
 *
 * @template {Element} Kind
 * @param {ParentNode} root
 * @param {string} selector
 * @param {new () => Kind} kind
 * @returns {Kind}
 */
export function find(root, selector, kind) {
  const found = root.querySelector(selector);
  if (!(found instanceof kind)) throw new Error(`the page has no ${selector}`);
  return found;
}

/** @param {string} label @param {EventListener} click @param {Props} [props] */
export function button(label, click, props = {}) {
  return el("button", { type: "button", click, ...props }, label);
}

/** Put other choices into a list; keeps what is chosen where that is still offered.
 *
 * @param {HTMLSelectElement} select @param {Array<[string, string]>} choices value and label */
export function offer(select, choices) {
  const chosen = select.value;
  select.replaceChildren(...choices.map(([value, label]) => el("option", { value }, label)));
  if (choices.some(([value]) => value === chosen)) select.value = chosen;
}

/** Say something to everybody, screen readers included. @param {string} text */
export function announce(text) {
  find(document, "#announcer", HTMLElement).textContent = text;
}

/** Set a text only where it differs, so that screen readers do not repeat it.
 * @param {Element} element @param {string} text */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds <= 0) return "0 s";
  if (seconds < 9.95 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/**
 * Have files dropped on, pasted into or chosen for an element.
 *
 * @param {HTMLElement} zone
 * @param {(files: File[]) => void} take
 */
export function takesFiles(zone, take) {
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    zone.classList.remove("over");
    const files = [...(event.dataTransfer?.files ?? [])];
    if (files.length) take(files);
  });
  zone.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) take(files);
  });
  for (const input of zone.querySelectorAll("input[type=file]")) {
    if (!(input instanceof HTMLInputElement)) continue;
    input.addEventListener("change", () => {
      const files = [...(input.files ?? [])];
      // the same file may be chosen again
      input.value = "";
      if (files.length) take(files);
    });
  }
}
