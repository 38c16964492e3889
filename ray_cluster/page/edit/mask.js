// <rc-mask>: a picture on which a brush and boxes say what is to be edited.

import { button, el } from "../base/dom.js";
import { Strokes } from "./strokes.js";

// longest sides as shown; the mask keeps the picture's own size
const MOST_SHOWN_PX = 1600;
const LEAST_SHOWN_PX = 640;
const OVERLAY = "#ff2e63";
const OVERLAY_ALPHA = 0.5;

/** @typedef {[number, number, number, number]} Box left, top, width, height */

export class Mask extends HTMLElement {
  #canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "The picture to paint on" });
  #paint = el("canvas");
  #strokes;
  /** @type {ImageBitmap | null} */
  #picture = null;
  #tool = el("select", {}, el("option", { value: "brush" }, "brush"), el("option", { value: "box" }, "rectangle"));
  #width = el("input", { type: "range", min: 1, max: 100, value: 20 });
  #sides = ["left", "top", "width", "height"].map((name) =>
    el("input", { type: "number", min: 0, "aria-label": `Rectangle: ${name}`, placeholder: name }));
  /** Where the model will look, by the mask's bounds; asked for at each change. @type {(bounds: () => Box | null) => Box | null} */
  cropOf = () => null;
  featherPx = 0;

  constructor() {
    super();
    this.#strokes = new Strokes(this.#canvas, () => this.#chosen(), () => this.#changed(), () => this.size);
  }

  connectedCallback() {
    if (this.firstChild) return;
    const add = button("Add", () => this.#addBox());
    this.append(
      el("div", { class: "tools" },
        el("label", {}, "Tool ", this.#tool),
        el("label", {}, "Brush ", this.#width),
        button("Undo", () => this.#strokes.undo()),
        button("Redo", () => this.#strokes.redo()),
        button("Clear", () => this.#strokes.clear()),
        button("Save the mask", () => this.#save())),
      this.#canvas,
      el("p", { class: "hint" }, "Paint what is to change; nothing painted: all of it. Keys: arrows move, with Shift further; Enter begins and ends a stroke; Ctrl+Z undoes."),
      el("details", {}, el("summary", {}, "A rectangle by numbers"), el("div", { class: "row" }, ...this.#sides, add)),
    );
  }

  /** Width and height of the picture. @returns {[number, number]} */
  get size() {
    return [this.#picture?.width ?? 1, this.#picture?.height ?? 1];
  }

  get isEmpty() {
    return this.#strokes.isEmpty;
  }

  /** @param {ImageBitmap} picture */
  show(picture) {
    this.#picture?.close();
    this.#picture = picture;
    const longest = Math.max(...this.size);
    const scale = Math.min(MOST_SHOWN_PX / longest, Math.max(1, LEAST_SHOWN_PX / longest));
    for (const canvas of [this.#canvas, this.#paint]) {
      canvas.width = Math.max(1, Math.round(picture.width * scale));
      canvas.height = Math.max(1, Math.round(picture.height * scale));
    }
    this.#canvas.setAttribute("aria-label", `The picture, ${picture.width} by ${picture.height} pixels, to paint on`);
    this.#strokes.reset();
  }

  focusPicture() {
    this.#canvas.focus();
    this.#canvas.scrollIntoView({ block: "nearest" });
  }

  /** Paint the picture and what is marked anew. */
  refresh() {
    const context = this.#canvas.getContext("2d");
    const marks = this.#paint.getContext("2d", { willReadFrequently: true });
    if (!context || !marks || this.#picture === null) return;
    const { width, height } = this.#canvas;
    const scale = width / this.#picture.width;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.#picture, 0, 0, width, height);
    marks.clearRect(0, 0, width, height);
    this.#strokes.draw(marks, scale);
    context.globalAlpha = OVERLAY_ALPHA;
    // the edit is blended in from the mask's edge inwards: as a hint, the edge is soft
    context.filter = this.featherPx ? `blur(${(this.featherPx * scale) / 2}px)` : "none";
    context.drawImage(this.#paint, 0, 0);
    context.filter = "none";
    context.globalAlpha = 1;
    const crop = this.cropOf(() => this.#bounds(marks));
    if (crop) outline(context, crop, scale);
    this.#strokes.drawCursor(context, scale);
  }

  /** The mask as the API takes it: transparent where the picture is to change. @returns {Promise<Blob | null>} */
  async toBlob() {
    if (this.isEmpty) return null;
    const [width, height] = this.size;
    const canvas = el("canvas", { width, height });
    const context = canvas.getContext("2d");
    if (!context) return null;
    this.#strokes.draw(context, 1);
    context.globalCompositeOperation = "source-out";
    context.fillStyle = "#000";
    context.fillRect(0, 0, width, height);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }

  async #save() {
    const mask = await this.toBlob();
    if (mask === null) return;
    const href = URL.createObjectURL(mask);
    el("a", { href, download: "mask.png" }).click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  }

  /** @returns {import("./strokes.js").Tool} */
  #chosen() {
    const share = Number(this.#width.value) / 100;
    return {
      tool: this.#tool.value === "box" ? "box" : "brush",
      width: Math.max(1, share * share * Math.min(...this.size) + 1),
      colour: OVERLAY,
    };
  }

  #addBox() {
    const [left, top, width, height] = this.#sides.map((one) => Number(one.value));
    if (width <= 0 || height <= 0) return;
    const tool = { ...this.#chosen(), tool: /** @type {const} */ ("box") };
    this.#strokes.add({ tool, points: [[left, top], [left + width, top + height]] });
  }

  #changed() {
    this.refresh();
    this.dispatchEvent(new Event("change", { bubbles: true }));
  }

  /** Bounds of what is painted, in pixels of the picture. @param {CanvasRenderingContext2D} marks @returns {Box | null} */
  #bounds(marks) {
    const { width, height } = marks.canvas;
    if (this.isEmpty) return null;
    const { data } = marks.getImageData(0, 0, width, height);
    let [left, top, right, bottom] = [width, height, -1, -1];
    for (let at = 3, pixel = 0; at < data.length; at += 4, pixel += 1) {
      if (data[at] < 128) continue;
      const x = pixel % width;
      const y = (pixel - x) / width;
      left = Math.min(left, x);
      right = Math.max(right, x);
      top = Math.min(top, y);
      bottom = Math.max(bottom, y);
    }
    const scale = this.size[0] / width;
    if (right < 0) return null;
    return /** @type {Box} */ ([left, top, right + 1 - left, bottom + 1 - top].map((one) => Math.round(one * scale)));
  }
}

/** @param {CanvasRenderingContext2D} context @param {Box} box @param {number} scale */
function outline(context, box, scale) {
  const [left, top, width, height] = box.map((one) => one * scale);
  for (const [colour, offset] of /** @type {Array<[string, number]>} */ ([["#000", 0], ["#fff", 6]])) {
    context.strokeStyle = colour;
    context.lineWidth = 2;
    context.setLineDash([6, 6]);
    context.lineDashOffset = offset;
    context.strokeRect(left + 1, top + 1, width - 2, height - 2);
  }
  context.setLineDash([]);
}

customElements.define("rc-mask", Mask);
