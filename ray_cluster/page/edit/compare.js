// <rc-compare>: two pictures behind a slider, or what differs between them.

import { button, el } from "../base/dom.js";

export class Compare extends HTMLElement {
  #after = el("img", { class: "after", alt: "After" });
  #before = el("img", { class: "before", alt: "Before" });
  #difference = el("canvas", { role: "img", "aria-label": "What differs, brighter where more", hidden: true });
  #slider = el("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "How much of the picture before is shown" });
  #shown = el("span", { class: "hint", role: "status" });

  connectedCallback() {
    if (this.firstChild) return;
    this.#slider.addEventListener("input", () => this.#slide());
    this.append(
      el("div", { class: "stack" }, this.#after, this.#before, this.#difference),
      this.#slider,
      el("p", { class: "actions" },
        button("Before and after", () => this.#choose(false)),
        button("Difference", () => this.#choose(true)),
        this.#shown),
    );
    this.#slide();
  }

  disconnectedCallback() {
    URL.revokeObjectURL(this.#before.src);
  }

  /** @param {Blob} before @param {string} after URL */
  show(before, after) {
    URL.revokeObjectURL(this.#before.src);
    this.#before.src = URL.createObjectURL(before);
    this.#after.src = after;
    this.#choose(false);
  }

  #slide() {
    this.#before.style.setProperty("clip-path", `inset(0 ${100 - Number(this.#slider.value)}% 0 0)`);
  }

  /** @param {boolean} isDifference */
  async #choose(isDifference) {
    this.#difference.hidden = !isDifference;
    this.#before.hidden = this.#slider.hidden = isDifference;
    this.#shown.textContent = "";
    if (isDifference) this.#shown.textContent = await this.#compute();
  }

  async #compute() {
    await Promise.all([this.#before.decode(), this.#after.decode()]);
    const { naturalWidth: width, naturalHeight: height } = this.#after;
    Object.assign(this.#difference, { width, height });
    const context = this.#difference.getContext("2d", { willReadFrequently: true });
    if (!context) return "";
    context.drawImage(this.#after, 0, 0);
    context.globalCompositeOperation = "difference";
    context.drawImage(this.#before, 0, 0, width, height);
    const pixels = context.getImageData(0, 0, width, height);
    let differing = 0;
    for (let at = 0; at < pixels.data.length; at += 4) {
      if (pixels.data[at] || pixels.data[at + 1] || pixels.data[at + 2]) differing += 1;
      for (let channel = 0; channel < 3; channel += 1) pixels.data[at + channel] *= 3;
      pixels.data[at + 3] = 255;
    }
    context.putImageData(pixels, 0, 0);
    return `${((100 * differing) / (width * height)).toFixed(1)} % of the pixels differ`;
  }
}

customElements.define("rc-compare", Compare);
