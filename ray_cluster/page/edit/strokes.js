// Strokes of a brush and boxes on a canvas, by pointer or keyboard, each of which can be undone.

/** @typedef {{tool: "brush" | "box", width: number, colour: string}} Tool */
/** @typedef {{tool: Tool, points: Array<[number, number]>}} Stroke in pixels of the picture */

const STEP_SHARE = 1 / 64;
const FAR = 8;

export class Strokes {
  /** @type {Stroke[]} */
  #done = [];
  /** @type {Stroke[]} */
  #undone = [];
  /** @type {[number, number] | null} */
  #cursor = null;
  #isDown = false;

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {() => Tool} tool as chosen now
   * @param {() => void} changed to draw anew
   * @param {() => [number, number]} [size] of the picture, where it is not that of the canvas
   */
  constructor(canvas, tool, changed, size = () => [canvas.width, canvas.height]) {
    this.canvas = canvas;
    this.tool = tool;
    this.changed = changed;
    this.size = size;
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (this.#isDown = false));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("focus", () => this.changed());
    canvas.addEventListener("blur", () => this.#forgetCursor());
  }

  get isEmpty() {
    return this.#done.length === 0;
  }

  /** @param {Stroke} stroke */
  add(stroke) {
    this.#done.push(stroke);
    this.#undone = [];
    this.changed();
  }

  undo() {
    const last = this.#done.pop();
    if (last) this.#undone.push(last);
    this.changed();
  }

  redo() {
    const next = this.#undone.pop();
    if (next) this.#done.push(next);
    this.changed();
  }

  clear() {
    this.#undone = this.#done.reverse();
    this.#done = [];
    this.changed();
  }

  /** Forget all of it, for another picture. */
  reset() {
    this.#done = [];
    this.#undone = [];
    this.changed();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} scale from pixels of the picture */
  draw(context, scale) {
    context.save();
    context.scale(scale, scale);
    context.lineCap = context.lineJoin = "round";
    for (const { tool, points } of this.#done) {
      context.strokeStyle = context.fillStyle = tool.colour;
      context.lineWidth = tool.width;
      const [[left, top]] = points;
      const [right, bottom] = points[points.length - 1];
      if (tool.tool === "box") context.fillRect(left, top, right - left, bottom - top);
      else {
        context.beginPath();
        context.moveTo(left, top);
        // a dab is a line to where it begins
        for (const [x, y] of points) context.lineTo(x, y);
        context.stroke();
      }
    }
    context.restore();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} scale */
  drawCursor(context, scale) {
    if (this.#cursor === null || document.activeElement !== this.canvas) return;
    const [x, y] = this.#cursor.map((one) => one * scale);
    context.save();
    context.lineWidth = 1;
    for (const [colour, radius] of /** @type {Array<[string, number]>} */ ([["#000", 5], ["#fff", 4]])) {
      context.strokeStyle = colour;
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.stroke();
    }
    context.restore();
  }

  /** @param {PointerEvent} event @returns {[number, number]} */
  #place(event) {
    const seen = this.canvas.getBoundingClientRect();
    const [width, height] = this.size();
    const x = ((event.clientX - seen.left) / seen.width) * width;
    const y = ((event.clientY - seen.top) / seen.height) * height;
    return [Math.min(Math.max(x, 0), width), Math.min(Math.max(y, 0), height)];
  }

  /** @param {PointerEvent} event */
  #down(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.#isDown = true;
    this.#cursor = null;
    this.add({ tool: this.tool(), points: [this.#place(event)] });
  }

  /** @param {PointerEvent} event */
  #move(event) {
    if (!this.#isDown) return;
    this.#extend(this.#place(event));
  }

  /** @param {[number, number]} place */
  #extend(place) {
    const stroke = this.#done[this.#done.length - 1];
    if (stroke === undefined) return;
    if (stroke.tool.tool === "box") stroke.points = [stroke.points[0], place];
    else stroke.points.push(place);
    this.changed();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const [width, height] = this.size();
    if (step) {
      const by = Math.max(1, Math.max(width, height) * STEP_SHARE) * (event.shiftKey ? FAR : 1);
      const [x, y] = this.#cursor ?? [width / 2, height / 2];
      this.#cursor = [
        Math.min(Math.max(x + step[0] * by, 0), width),
        Math.min(Math.max(y + step[1] * by, 0), height),
      ];
      if (this.#isDown) this.#extend(this.#cursor);
      this.changed();
    } else if (event.key === "Enter" || event.key === " ") {
      this.#cursor ??= [width / 2, height / 2];
      // once more ends what was begun
      this.#isDown = !this.#isDown;
      if (this.#isDown) this.add({ tool: this.tool(), points: [this.#cursor] });
    } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") {
      if (event.shiftKey) this.redo();
      else this.undo();
    } else return;
    event.preventDefault();
  }

  #forgetCursor() {
    this.#isDown = false;
    this.#cursor = null;
    this.changed();
  }
}
