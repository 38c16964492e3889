// The section Make: an image from text.

import { find, takesFiles } from "../base/dom.js";
import { Fields, showError } from "../base/fields.js";
import { callOf, readRecipe } from "../base/recipe.js";
import { begun, shownFirst } from "../jobs/run.js";
import { ControlNetList, LoraList } from "./add-ons.js";
import { Estimates } from "./estimate.js";

/** @typedef {import("../base/models.js").Offer} Offer */
/** @typedef {import("../base/types.js").Body} Body */


export class Make {
  /** @param {HTMLFormElement} form @param {HTMLElement} results @param {Offer} offered */
  constructor(form, results, offered) {
    this.form = form;
    this.results = results;
    this.fields = new Fields(form, offered, (id) => offered.card(id)?.edits !== "masked");
    this.loras = find(form, "rc-loras", LoraList);
    this.nets = find(form, "rc-controlnets", ControlNetList);
    this.nets.sizeOf = () => this.#size();
    const estimates = new Estimates(find(form, ".estimate", HTMLElement), () => this.body());
    for (const event of ["input", "change", "filled"]) form.addEventListener(event, () => estimates.later());
    this.fields.model.addEventListener("change", () => this.#offer());
    form.addEventListener("submit", (event) => this.#submit(event));
    takesFiles(form, ([file]) => this.takeRecipe(file));
    this.#offer();
  }

  #offer() {
    const { offered, model } = this.fields;
    this.loras.offer(offered.loras(model.value));
    this.nets.offer(offered.netsOf(model.value), offered.detectors);
  }

  #size() {
    const { size } = this.fields.body();
    return String(size ?? this.fields.card?.default_size ?? "");
  }

  /** @returns {Body} */
  body() {
    const body = this.fields.body();
    const loras = this.loras.value;
    const controlnets = this.nets.value;
    return {
      ...body,
      ...(loras.length ? { loras } : {}),
      ...(controlnets.length ? { controlnets } : {}),
    };
  }

  /** @param {Event} event */
  async #submit(event) {
    event.preventDefault();
    const send = find(this.form, "button.main", HTMLButtonElement);
    const [unready] = this.nets.unready;
    if (unready) return showError(this.form, `Give ${unready} a map to follow, or remove it.`);
    send.disabled = true;
    showError(this.form, null);
    try {
      const body = { ...this.body(), ...this.fields.offered.wishes(this.fields.model.value) };
      const run = await begun({ body, files: [] });
      shownFirst(this.results, run);
    } catch (error) {
      showError(this.form, error);
    } finally {
      send.disabled = false;
    }
  }

  /** Show a call in the form. @param {Body} body @param {string[]} missing what the user must give again */
  fill(body, missing) {
    const unknown = this.fields.fill(body);
    this.#offer();
    this.loras.value = body.loras ?? [];
    const added = new Set(this.loras.value.map((one) => one.name));
    for (const { name } of body.loras ?? []) if (!added.has(name)) unknown.push(`the LoRA ${name}, which is not here`);
    this.nets.clear();
    this.fields.filled([...unknown, ...missing]);
  }

  /** Fill the form from a PNG of the service. @param {File} file */
  async takeRecipe(file) {
    const recipe = await readRecipe(file);
    if (recipe === null) showError(this.form, "This file carries no recipe of ray-cluster: PNGs that it made do.");
    else {
      const { body, missing } = callOf(recipe);
      this.fill(body, missing);
    }
  }
}
