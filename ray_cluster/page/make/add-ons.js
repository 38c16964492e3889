// <rc-loras> and <rc-controlnets>: what a call adds to its model, a row each.

import { ApiError, blobOf, callJson, upload } from "../base/api.js";
import { button, el, find, takesFiles } from "../base/dom.js";
import { Pad } from "./pad.js";

/** @typedef {import("../base/types.js").ControlNet} ControlNet */

const MOST_LORAS = 8;
const MOST_NETS = 3;

/** A list of rows with a choice of what to add; hidden where there is nothing to choose. */
class Rows extends HTMLElement {
  #rows = el("div");
  #choice = el("select", { "aria-label": "To add" });
  #add = button("Add", () => this.#chosen());
  #names = /** @type {string[]} */ ([]);

  /** @param {string} title @param {number} most */
  constructor(title, most) {
    super();
    this.title_ = title;
    this.most = most;
  }

  get rows() {
    return [...this.#rows.children];
  }

  /** @param {string[]} names @param {string[]} labels */
  choices(names, labels) {
    if (!this.firstChild) {
      const legend = el("legend", {}, this.title_);
      const row = el("div", { class: "adder" }, this.#choice, this.#add);
      this.append(el("fieldset", {}, legend, this.#rows, row));
    }
    this.#names = names;
    this.hidden = names.length === 0;
    this.#choice.replaceChildren(...names.map((value, index) => el("option", { value }, labels[index])));
    for (const row of this.rows) if (!names.includes(row.getAttribute("data-name") ?? "")) row.remove();
    this.changed();
  }

  changed() {
    this.#add.disabled = this.rows.length >= this.most;
    this.dispatchEvent(new Event("change", { bubbles: true }));
  }

  #chosen() {
    const row = this.add(this.#choice.value);
    row?.querySelector("input")?.focus();
  }

  clear() {
    this.#rows.replaceChildren();
    this.changed();
  }

  /** @param {string} name @returns {HTMLElement | null} its new row */
  add(name) {
    if (!this.#names.includes(name) || this.rows.length >= this.most) return null;
    const remove = button("Remove", () => {
      row.remove();
      this.changed();
      this.#add.focus();
    });
    const row = el("div", { class: "add-on", "data-name": name, role: "group", "aria-label": name });
    row.append(el("strong", {}, name), ...this.parts(name, row), remove);
    this.#rows.append(row);
    this.changed();
    return row;
  }

  /** @param {string} _name @param {HTMLElement} _row @returns {Node[]} */
  parts(_name, _row) {
    return [];
  }
}

/** A slider with its value beside it. @param {string} label @param {string} name
 * @param {[number, number]} range @param {number} value */
function slider(label, name, [min, max], value) {
  const output = el("output", {}, String(value));
  const input = el("input", { type: "range", "data-field": name, min, max, step: 0.05, value });
  input.addEventListener("input", () => (output.textContent = input.value));
  return el("label", { class: "slider" }, label, input, output);
}

/** @param {Element} row @param {string} name */
const numberOf = (row, name) => Number(find(row, `[data-field=${name}]`, HTMLInputElement).value);

export class LoraList extends Rows {
  constructor() {
    super("LoRAs", MOST_LORAS);
  }

  /** @param {string[]} names */
  offer(names) {
    this.choices(names, names);
  }

  /** @param {string} _name @returns {Node[]} */
  parts(_name) {
    return [slider("Weight", "scale", [-1, 2], 1)];
  }

  /** As the API's `loras`. @returns {Array<{name: string, scale: number}>} */
  get value() {
    return this.rows.map((row) => ({ name: row.getAttribute("data-name") ?? "", scale: numberOf(row, "scale") }));
  }

  set value(loras) {
    this.clear();
    for (const { name, scale } of loras) {
      const input = this.add(String(name))?.querySelector("input");
      if (!input) continue;
      // weights that the slider does not reach were asked for by other programs
      if (scale < Number(input.min)) input.min = "-4";
      if (scale > Number(input.max)) input.max = "4";
      input.value = String(scale);
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }
  }
}

export class ControlNetList extends Rows {
  /** The size of the image to be made, WIDTHxHEIGHT. */
  sizeOf = () => "";
  /** @type {ControlNet[]} */
  #nets = [];
  #detectors = ["none"];

  constructor() {
    super("ControlNets", MOST_NETS);
  }

  /** @param {ControlNet[]} nets @param {string[]} detectors */
  offer(nets, detectors) {
    this.#nets = nets;
    this.#detectors = ["none", ...detectors.filter((one) => one !== "none")];
    this.choices(nets.map((one) => one.name), nets.map((one) => (one.description ? `${one.name}: ${one.description}` : one.name)));
  }

  /** @param {string} name @param {HTMLElement} row @returns {Node[]} */
  parts(name, row) {
    const map = new MapChoice(this.#detectors, this.sizeOf, (id) => {
      row.dataset.image = id;
      this.changed();
    });
    const description = this.#nets.find((one) => one.name === name)?.description ?? "";
    return [
      el("p", { class: "hint" }, description),
      map.element,
      slider("Weight", "scale", [0, 2], 1),
      slider("From", "start", [0, 0.95], 0),
      slider("To", "end", [0.05, 1], 1),
    ];
  }

  /** Names of those whose map is not there yet. */
  get unready() {
    return this.rows.filter((row) => !row.getAttribute("data-image")).map((row) => row.getAttribute("data-name") ?? "");
  }

  /** As the API's `controlnets`, of those that are ready. */
  get value() {
    return this.rows
      .filter((row) => row.getAttribute("data-image"))
      .map((row) => ({
        name: row.getAttribute("data-name") ?? "",
        image: row.getAttribute("data-image") ?? "",
        scale: numberOf(row, "scale"),
        start: numberOf(row, "start"),
        end: numberOf(row, "end"),
      }));
  }
}

/** The map that a ControlNet follows: a picture, what a detector makes of one, or a drawing. */
class MapChoice {
  #picture = /** @type {Blob | null} */ (null);
  #shown = el("img", { class: "map", alt: "The map that is followed", hidden: true });
  #status = el("p", { class: "hint", role: "status" }, "Drop a picture here, choose one, or draw.");
  #detector;
  #numAsked = 0;

  /** @param {string[]} detectors @param {() => string} sizeOf @param {(id: string) => void} done */
  constructor(detectors, sizeOf, done) {
    this.sizeOf = sizeOf;
    this.done = done;
    this.#detector = el("select", {}, ...detectors.map((value) => el("option", { value }, value === "none" ? "none: the picture is a map" : value)));
    this.#detector.addEventListener("change", () => this.#make());
    const file = el("input", { type: "file", accept: "image/*" });
    this.element = el(
      "div",
      { class: "drop" },
      el("label", {}, "Picture ", file),
      el("label", {}, "Detector ", this.#detector),
      button("Draw", () => this.#draw()),
      this.#status,
      this.#shown,
    );
    takesFiles(this.element, ([picture]) => {
      this.#picture = picture;
      this.#make();
    });
  }

  #draw() {
    const [width, height] = (this.sizeOf() || "512x512").split("x").map(Number);
    const pad = new Pad(width, height, (drawing) => {
      this.#picture = drawing;
      this.#detector.value = "none";
      this.#make();
    });
    pad.open();
  }

  /** Have the map made, and show it before it is used. */
  async #make() {
    const picture = this.#picture;
    if (picture === null) return;
    const number = ++this.#numAsked;
    this.#status.textContent = "…";
    try {
      const [map, id] = await (this.#detector.value === "none" ? asItIs(picture) : detected(picture, this.#detector.value, this.sizeOf()));
      if (number !== this.#numAsked) return;
      URL.revokeObjectURL(this.#shown.src);
      this.#shown.src = URL.createObjectURL(map);
      this.#shown.hidden = false;
      this.#status.textContent = "This map will be followed:";
      this.done(id);
    } catch (error) {
      if (number !== this.#numAsked) return;
      this.#status.textContent = error instanceof ApiError ? error.message : String(error);
      this.#shown.hidden = true;
      this.done("");
    }
  }
}

/** @param {Blob} picture @returns {Promise<[Blob, string]>} */
async function asItIs(picture) {
  return [picture, await upload(picture)];
}

/** @param {Blob} picture @param {string} preprocess @param {string} size @returns {Promise<[Blob, string]>} */
async function detected(picture, preprocess, size) {
  const form = new FormData();
  form.append("preprocess", preprocess);
  if (/^[0-9]+x[0-9]+$/.test(size)) form.append("size", size);
  form.append("image", picture, "image");
  const { data } = await callJson("v1/preprocess", { form });
  return [blobOf(data[0].b64_json, "image/png"), data[0].file_id];
}

customElements.define("rc-loras", LoraList);
customElements.define("rc-controlnets", ControlNetList);
