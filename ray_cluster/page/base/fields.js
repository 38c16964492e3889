// The fields that images from text and edits share: a copy of the page's template, and its values.

import { announce, el, find, offer } from "./dom.js";
import { sizesOf } from "./models.js";

/** @typedef {import("./models.js").Offer} Offer */
/** @typedef {import("./types.js").Body} Body */

const NUMBERS = ["num_inference_steps", "guidance_scale", "seed", "n", "slo_s", "upscale", "strength", "feather_px"];
// shown as they are where a call says nothing
const USUAL = { fidelity: "exact", size: "auto", sampler: "", upscale: "1", n: "1", output_format: "png" };

export class Fields {
  /**
   * @param {HTMLFormElement} form gets the template's fields where it says so
   * @param {Offer} offered
   * @param {(id: string) => boolean} suits whether a model is one for this form
   */
  constructor(form, offered, suits) {
    const template = find(document, "#common", HTMLTemplateElement);
    find(form, ".common", HTMLElement).replaceWith(template.content.cloneNode(true));
    this.form = form;
    this.offered = offered;
    this.model = find(form, "[name=model]", HTMLSelectElement);
    this.size = find(form, "[name=size]", HTMLSelectElement);
    const names = offered.models.map((one) => one.id).filter(suits);
    offer(this.model, names.map((name) => [name, name]));
    find(form, ".other-size", HTMLElement).hidden = true;
    this.size.addEventListener("change", () => this.#showSize());
    this.model.addEventListener("change", () => this.show());
    this.show();
  }

  get card() {
    return this.offered.card(this.model.value);
  }

  /** @param {string} name */
  field(name) {
    const found = this.form.elements.namedItem(name);
    if (found instanceof HTMLInputElement || found instanceof HTMLSelectElement || found instanceof HTMLTextAreaElement)
      return found;
    throw new Error(`the form has no field ${name}`);
  }

  /** Show what the chosen model allows. */
  show() {
    const card = this.card;
    if (card === undefined) return;
    const sizes = sizesOf(card).map((one) => /** @type {[string, string]} */ ([one, one.replace("x", " × ")]));
    const auto = this.form.id === "edit" ? "as the picture" : `${card.default_size.replace("x", " × ")} (usual)`;
    offer(this.size, [["auto", auto], ...sizes, ["other", "other …"]]);
    const samplers = Object.entries(card.max_steps_by_sampler);
    const select = find(this.form, "[name=sampler]", HTMLSelectElement);
    offer(select, [["", "usual"], ...samplers.map(([name]) => /** @type {[string, string]} */ ([name, name]))]);
    this.field("num_inference_steps").setAttribute("max", String(Math.max(...samplers.map(([, most]) => most))));
    for (const name of ["width", "height"]) {
      const input = this.field(name);
      const { min_px, max_px, size_multiple_px } = card;
      const bounds = { min: Math.ceil(min_px / size_multiple_px) * size_multiple_px, max: max_px, step: size_multiple_px };
      for (const [bound, value] of Object.entries(bounds)) input.setAttribute(bound, String(value));
    }
    this.#allow("fidelity", card.fewer_steps !== null && this.form.id !== "edit");
    this.#allow("upscale", card.upscale !== null);
    const upscale = find(this.form, "[name=upscale]", HTMLSelectElement);
    const factors = (card.upscale?.factors ?? [1]).map(String);
    offer(upscale, factors.map((one) => [one, one === "1" ? "no" : `${one} times`]));
    this.#showSize();
  }

  /** @param {string} name @param {boolean} isOffered */
  #allow(name, isOffered) {
    const field = this.field(name);
    field.disabled = !isOffered;
    const label = field.closest("label");
    if (label) label.hidden = !isOffered;
  }

  #showSize() {
    const isOther = this.size.value === "other";
    find(this.form, ".other-size", HTMLElement).hidden = !isOther;
    for (const name of ["width", "height"]) this.field(name).disabled = !isOther;
  }

  /** The call that the fields say; what is as usual is left out. @returns {Body} */
  body() {
    /** @type {Body} */
    const body = {};
    for (const field of this.form.elements) {
      if (!(field instanceof HTMLInputElement || field instanceof HTMLSelectElement || field instanceof HTMLTextAreaElement))
        continue;
      const { name } = field;
      if (!name || field.disabled || ["width", "height"].includes(name)) continue;
      if (field instanceof HTMLInputElement && field.type === "checkbox") {
        if (field.checked) body[name] = field.value;
        continue;
      }
      if (!field.value.trim() || /** @type {Record<string, string>} */ (USUAL)[name] === field.value) continue;
      body[name] = NUMBERS.includes(name) ? Number(field.value) : field.value;
    }
    if (body.size === "other") {
      const sides = ["width", "height"].map((name) => this.field(name).value);
      if (sides.every(Boolean)) body.size = sides.join("x");
      else delete body.size;
    }
    return body;
  }

  /** Show a call in the fields; what it does not say becomes as usual.
   * @param {Body} body @returns {string[]} what of it cannot be shown */
  fill(body) {
    this.form.reset();
    const isKnown = !body.model || [...this.model.options].some(({ value }) => value === body.model);
    if (body.model && isKnown) this.model.value = body.model;
    this.show();
    for (const [name, value] of Object.entries(body)) {
      const field = this.form.elements.namedItem(name);
      if (name === "model" || name === "size") continue;
      if (field instanceof HTMLInputElement && field.type === "checkbox") field.checked = field.value === String(value);
      else if (field instanceof HTMLSelectElement) choose(field, String(value));
      else if (field instanceof HTMLInputElement || field instanceof HTMLTextAreaElement) field.value = String(value);
    }
    this.#fillSize(/^[0-9]+x[0-9]+$/.test(body.size) ? body.size : "auto");
    this.form.dispatchEvent(new Event("filled"));
    return isKnown ? [] : [`the model ${body.model}, which is not here`];
  }

  /** Say that the form was filled, and what of it was not. @param {string[]} missing */
  filled(missing) {
    const text = missing.length ? `Not filled in: ${missing.join(", ")}.` : "";
    showError(this.form, text || null);
    announce(text || "The form is filled from the recipe.");
    this.field("prompt").focus();
  }

  /** @param {string} size */
  #fillSize(size) {
    const value = size === this.card?.default_size && this.form.id !== "edit" ? "auto" : size;
    const known = [...this.size.options].some((one) => one.value === value);
    this.size.value = known ? value : "other";
    if (!known) {
      const [width, height] = size.split("x");
      this.field("width").value = width ?? "";
      this.field("height").value = height ?? "";
    }
    this.#showSize();
  }
}

/** @param {HTMLSelectElement} select @param {string} value */
function choose(select, value) {
  if ([...select.options].some((one) => one.value === value)) select.value = value;
}

/** Show an error beside the form, and lead to the field that it is about.
 *
 * @param {HTMLFormElement} form @param {unknown} error */
export function showError(form, error) {
  const place = find(form, ".error", HTMLElement);
  place.replaceChildren();
  if (error === null) return;
  const text = error instanceof Error ? error.message : String(error);
  place.append(el("span", {}, text));
  const param = error instanceof Error && "param" in error ? error.param : null;
  const field = typeof param === "string" ? form.elements.namedItem(param) : null;
  if (field instanceof HTMLElement) {
    field.closest("details")?.setAttribute("open", "");
    field.focus();
  }
}
