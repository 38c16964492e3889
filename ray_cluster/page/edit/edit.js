// The section Edit: one picture or several, a mask, and what comes of it.

import { el, button, find, takesFiles } from "../base/dom.js";
import { Fields, showError } from "../base/fields.js";
import { begun, shownFirst } from "../jobs/run.js";
import { Compare } from "./compare.js";
import { cropOf } from "./crop.js";
import { Mask } from "./mask.js";

/** @typedef {import("../base/models.js").Offer} Offer */
/** @typedef {import("../base/types.js").Body} Body */

// fields that mean something with a mask alone
const OF_MASKS = ["feather_px", "crop"];

export class Edit {
  /** @type {Blob[]} */
  #pictures = [];
  #thumbs = el("ol", { class: "thumbs" });

  /** @param {HTMLFormElement} form @param {HTMLElement} results @param {Offer} offered */
  constructor(form, results, offered) {
    this.form = form;
    this.results = results;
    this.fields = new Fields(form, offered, (id) => (offered.card(id)?.max_input_images ?? 0) > 0);
    this.mask = find(form, "rc-mask", Mask);
    this.mask.cropOf = (bounds) => this.#crop(bounds);
    find(form, ".pictures-given", HTMLElement).append(this.#thumbs);
    takesFiles(form, (files) => this.take(files));
    form.addEventListener("input", () => this.#showMask());
    form.addEventListener("change", (event) => event.target !== this.mask && this.#showMask());
    form.addEventListener("filled", () => this.#showMask());
    form.addEventListener("submit", (event) => this.#submit(event));
    this.fields.model.addEventListener("change", () => this.#showModel());
    results.addEventListener("rc-compare", (event) => this.#compare(/** @type {CustomEvent} */ (event)));
    this.#show();
    this.#showModel();
  }

  /** Whether the model changes a picture, and does not look at whole ones alone. */
  get #hasMask() {
    return this.fields.card?.edits !== "none";
  }

  /** Show what the model takes beside pictures. */
  #showModel() {
    this.mask.hidden = !this.#hasMask || !this.#pictures.length;
    for (const one of this.form.querySelectorAll(".of-mask")) if (one instanceof HTMLElement) one.hidden = !this.#hasMask;
  }

  /** Take pictures to edit; the first is the one that a mask is painted on. @param {Blob[]} files */
  async take(files) {
    showError(this.form, null);
    const most = this.fields.card?.max_input_images ?? 1;
    // one more picture replaces the only one that may be there
    const kept = most === 1 ? files.slice(0, 1) : [...this.#pictures, ...files];
    if (kept.length > most || (most === 1 && files.length > 1)) {
      showError(this.form, `This model takes ${most === 1 ? "one picture" : `${most} pictures at most`}.`);
    }
    this.#pictures = kept.slice(0, most);
    await this.#show();
  }

  async #show() {
    const [first] = this.#pictures;
    this.#showModel();
    for (const image of this.#thumbs.querySelectorAll("img")) URL.revokeObjectURL(image.src);
    this.#thumbs.replaceChildren(...this.#pictures.map((file, index) => this.#thumb(file, index)));
    if (first === undefined) return;
    try {
      // an upright one, as the service turns it
      this.mask.show(await createImageBitmap(first, { imageOrientation: "from-image" }));
    } catch {
      this.#pictures = [];
      await this.#show();
      showError(this.form, "This browser cannot read the file as a picture. Give a PNG, JPEG, WebP or AVIF.");
    }
  }

  /** @param {Blob} file @param {number} index */
  #thumb(file, index) {
    const image = el("img", { alt: `Picture ${index + 1}` });
    image.src = URL.createObjectURL(file);
    const remove = button("Remove", () => {
      this.#pictures.splice(index, 1);
      this.#show();
    }, { "aria-label": `Remove picture ${index + 1}` });
    return el("li", {}, image, remove);
  }

  /** @param {() => import("./mask.js").Box | null} boundsOf */
  #crop(boundsOf) {
    const crop = this.form.elements.namedItem("crop");
    const card = this.fields.card;
    const isWanted = crop instanceof HTMLInputElement && crop.checked;
    const bounds = isWanted ? boundsOf() : null;
    return bounds && card ? cropOf(bounds, this.mask.size, card) : null;
  }

  #showMask() {
    this.mask.featherPx = Number(this.fields.field("feather_px").value) || 0;
    this.mask.refresh();
  }

  /** The body as a form, and the files in it. */
  async #call() {
    const body = this.fields.body();
    const mask = this.#hasMask ? await this.mask.toBlob() : null;
    for (const name of OF_MASKS) if (mask === null) delete body[name];
    if (!this.#hasMask) delete body.strength;
    const form = new FormData();
    const name = this.#pictures.length > 1 ? "image[]" : "image";
    for (const picture of this.#pictures) form.append(name, picture, "picture");
    if (mask !== null) form.append("mask", mask, "mask.png");
    for (const [field, value] of Object.entries({ ...body, ...this.fields.offered.wishes(this.fields.model.value) })) {
      form.append(field, typeof value === "string" ? value : JSON.stringify(value));
    }
    const files = [...this.#pictures.map(() => name), ...(mask === null ? [] : ["mask"])];
    return { body, form, files };
  }

  /** @param {Event} event */
  async #submit(event) {
    event.preventDefault();
    showError(this.form, null);
    const [template] = this.#pictures;
    if (template === undefined) return showError(this.form, "Choose a picture to edit first.");
    const send = find(this.form, "button.main", HTMLButtonElement);
    send.disabled = true;
    try {
      const { body, form, files } = await this.#call();
      const run = await begun({ body, files, template }, form);
      shownFirst(this.results, run);
    } catch (error) {
      showError(this.form, error);
    } finally {
      send.disabled = false;
    }
  }

  /** Show a call in the form; pictures and mask stay. @param {Body} body @param {string[]} missing */
  fill(body, missing) {
    const unknown = this.fields.fill(body);
    this.#showModel();
    this.fields.filled([...unknown, ...missing]);
  }

  /** Begin with a picture in place of all others. @param {Blob} picture */
  async start(picture) {
    this.#pictures = [];
    await this.take([picture]);
    this.mask.focusPicture();
  }

  /** @param {CustomEvent} event */
  #compare({ target, detail: { template, url } }) {
    if (!(target instanceof Element)) return;
    const compare = target.querySelector("rc-compare") ?? target.appendChild(new Compare());
    if (compare instanceof Compare) compare.show(template, url);
  }
}
