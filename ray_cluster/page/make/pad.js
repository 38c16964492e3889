// A pad to draw a map on: lines and filled boxes in a colour on black.

import { button, el } from "../base/dom.js";
import { Strokes } from "../edit/strokes.js";

const LONGEST_SHOWN_PX = 480;

export class Pad {
  #box = el("dialog", { class: "pad", "aria-label": "Draw a map" });
  #canvas;
  #strokes;
  #colour = el("input", { type: "color", value: "#ffffff" });
  #tool = el("select", {}, el("option", { value: "brush" }, "line"), el("option", { value: "box" }, "box"));
  #width;

  /** @param {number} width @param {number} height @param {(drawing: Blob) => void} done */
  constructor(width, height, done) {
    this.#canvas = el("canvas", { width, height, tabindex: "0", role: "img", "aria-label": `Map of ${width} by ${height} pixels` });
    this.#width = el("input", { type: "number", min: 1, max: 64, value: Math.max(2, Math.round(width / 64)) });
    const scale = LONGEST_SHOWN_PX / Math.max(width, height);
    this.#canvas.style.setProperty("width", `${Math.round(width * scale)}px`);
    this.#strokes = new Strokes(
      this.#canvas,
      () => ({ tool: this.#tool.value === "box" ? "box" : "brush", width: Number(this.#width.value) || 1, colour: this.#colour.value }),
      () => this.#paint(),
    );
    const use = button("Use it", () => {
      this.#box.close();
      this.#paint();
      this.#canvas.toBlob((drawing) => drawing && done(drawing), "image/png");
    }, { class: "main" });
    this.#box.append(
      el("h2", {}, "Draw a map"),
      this.#canvas,
      el("p", { class: "tools" },
        el("label", {}, "Tool ", this.#tool),
        el("label", {}, "Colour ", this.#colour),
        el("label", {}, "Width ", this.#width),
        button("Undo", () => this.#strokes.undo()),
        button("Clear", () => this.#strokes.clear())),
      el("p", { class: "hint" }, "Keys: arrows move, with Shift further; Enter draws."),
      el("p", { class: "actions" }, use, button("Cancel", () => this.#box.close())),
    );
    this.#box.addEventListener("close", () => this.#box.remove());
  }

  open() {
    document.body.append(this.#box);
    this.#box.showModal();
    this.#paint();
    this.#canvas.focus();
  }

  #paint() {
    const context = this.#canvas.getContext("2d");
    if (!context) return;
    context.fillStyle = "#000";
    context.fillRect(0, 0, this.#canvas.width, this.#canvas.height);
    this.#strokes.draw(context, 1);
    // the cursor of the keyboard is no part of the drawing
    if (this.#box.open) this.#strokes.drawCursor(context, 1);
  }
}
