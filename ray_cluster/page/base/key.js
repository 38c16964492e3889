// The API key: asked for once, kept until the tab is closed, and nowhere else.

import { el, find } from "./dom.js";

// tabs of services below one host keep theirs apart
const NAME = `ray-cluster key of ${new URL("./", document.baseURI).pathname}`;

/** @type {Promise<boolean> | null} */
let asking = null;

export function storedKey() {
  return sessionStorage.getItem(NAME) ?? "";
}

export function forgetKey() {
  sessionStorage.removeItem(NAME);
  show();
}

/** Show the button that forgets the key where there is one. */
export function show() {
  find(document, "#forget", HTMLButtonElement).hidden = !storedKey();
}

/**
 * Ask for a key, once for all calls that need one.
 *
 * @param {string} refused the key that was not valid; empty if none was sent
 * @param {string} message what the service said
 * @returns {Promise<boolean>} whether there is another key to try
 */
export async function askKey(refused, message) {
  if (storedKey() !== refused) return true;
  asking ??= dialog(message).finally(() => (asking = null));
  return asking;
}

/** @param {string} message @returns {Promise<boolean>} */
function dialog(message) {
  const input = el("input", { type: "password", autocomplete: "off", required: true });
  const cancel = el("button", { type: "button" }, "Cancel");
  const form = el(
    "form",
    {},
    el("h2", { id: "key-title" }, "API key"),
    el("p", {}, message),
    el("label", {}, "Key ", input),
    el("p", { class: "hint" }, "It is kept until you close this tab, and sent to this service alone."),
    el("p", { class: "actions" }, el("button", { class: "main" }, "Use it"), cancel),
  );
  const box = el("dialog", { "aria-labelledby": "key-title", id: "key" }, form);
  document.body.append(box);
  box.showModal();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      // what no header can hold is in no key
      sessionStorage.setItem(NAME, input.value.replace(/[^\x21-\x7e]/g, ""));
      box.close();
      resolve(true);
    });
    cancel.addEventListener("click", () => box.close());
    box.addEventListener("close", () => {
      box.remove();
      show();
      resolve(false);
    });
  });
}
