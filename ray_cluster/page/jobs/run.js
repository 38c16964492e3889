// <rc-run>: one job, from the queue to its images.

import { call, callJson, fileUrl } from "../base/api.js";
import { announce, button, duration, el, say } from "../base/dom.js";
import { callOf, readRecipe } from "../base/recipe.js";
import { asCurl, asPython, showSnippet } from "../base/snippets.js";
import { followed, isOver } from "./follow.js";

/** @typedef {import("../base/types.js").Job} Job */
/** @typedef {import("../base/types.js").JobImage} JobImage */
/** @typedef {import("../base/types.js").Body} Body */

// of each section; all others stand in Jobs
const MOST_SHOWN = 20;

/**
 * What the page knows of a call that it has made itself.
 *
 * @typedef {object} Sent
 * @property {Body} body
 * @property {string[]} files names of the form's files; none for an image from text
 * @property {Blob} [template] of an edit
 */

export class Run extends HTMLElement {
  #title = el("h3");
  #meta = el("p", { class: "meta" });
  #state = el("p", { class: "state" });
  #bar = el("progress", { max: 1, value: 0, "aria-label": "Steps done" });
  #pictures = el("div", { class: "pictures" });
  #notes = el("div", { class: "notes" });
  #cancel = button("Cancel", () => this.#end());
  #watching = new AbortController();
  /** @type {Job | null} */
  #job = null;
  /** @type {Sent | null} */
  sent = null;

  /** @param {Job} job */
  show(job) {
    const before = this.#job?.state;
    this.#job = job;
    if (!this.#title.isConnected) {
      this.append(this.#title, this.#meta, this.#state, this.#bar, this.#pictures, this.#notes, this.#cancel);
    }
    this.dataset.state = job.state;
    say(this.#title, job.prompt || "(no prompt)");
    say(this.#meta, `${job.model} · ${job.size.replace("x", " × ")} · ${new Date(job.created * 1000).toLocaleTimeString()}`);
    say(this.#state, stateOf(job));
    this.#bar.value = job.num_steps ? job.step / job.num_steps : 0;
    this.#bar.hidden = this.#cancel.hidden = isOver(job);
    this.#notes.replaceChildren(...notesOf(job));
    this.#showPictures(job);
    if (before !== undefined && before !== job.state) announce(`${job.prompt}: ${stateOf(job)}`);
  }

  /** Show the job as it goes on; the element's removal ends that. */
  async follow() {
    const job = this.#job;
    if (job === null || isOver(job)) return;
    try {
      for await (const news of followed(job.id, this.#watching.signal)) this.show(news);
    } catch (error) {
      this.#fail(error);
    }
  }

  disconnectedCallback() {
    this.#watching.abort();
  }

  connectedCallback() {
    if (!this.#watching.signal.aborted) return;
    this.#watching = new AbortController();
    this.follow();
  }

  /** @param {Job} job */
  #showPictures(job) {
    const found = job.data.length
      ? job.data.map((image) => fileUrl(image.url))
      : Array.from({ length: job.n }, (_, index) => fileUrl(job.previews.find((one) => one.image === index)?.url ?? ""));
    found.forEach((url, index) => {
      const place = this.#pictures.children[index] ?? this.#pictures.appendChild(el("figure"));
      if (place instanceof HTMLElement && place.dataset.url !== url) {
        const image = job.data[index];
        const what = image ? "Image" : "Preview of image";
        const shown = url ? el("img", { src: url, alt: `${what} ${index + 1}: ${job.prompt}`, loading: "lazy" }) : blank(job);
        place.replaceChildren(shown, ...(image && url ? this.#captionOf(job, image, url, index) : []));
        place.dataset.url = url;
        place.classList.toggle("preview", !image);
      }
    });
    if (isOver(job) && !job.data.length) this.#pictures.replaceChildren();
  }

  /** @param {Job} job @param {JobImage} image @param {string} url @param {number} index */
  #captionOf(job, image, url, index) {
    const details = [`seed ${image.seed}`, `${image.num_inference_steps} steps`];
    if (image.timing) details.push(duration(image.timing.total_s));
    if (image.cascade) details.push(`by ${image.cascade.model} (${image.cascade.reason.replaceAll("_", " ")})`);
    const kind = url.split(".").pop();
    const name = `${job.model.replace(/[^\w.-]+/g, "-")}-${image.seed}.${kind}`;
    const actions = el(
      "div",
      { class: "actions" },
      el("a", { class: "button", href: url, download: name }, "Download"),
      button("Same again", () => this.#again(image, index)),
      button("Edit it", () => this.#edit(url)),
      button("As curl", () => this.#snippet("As curl", asCurl, image, url)),
      button("As Python", () => this.#snippet("As Python", asPython, image, url)),
    );
    const template = this.sent?.template;
    if (template) actions.append(button("Compare", () => this.#tell("rc-compare", { template, url })));
    return [el("figcaption", {}, details.join(" · ")), actions];
  }

  /** The call that makes an image again. @param {JobImage} image @param {string} url */
  async #callOf(image, url) {
    if (this.sent) {
      const { n: _, ...body } = this.sent.body;
      return { body: { ...body, seed: image.seed }, files: this.sent.files, missing: [] };
    }
    const recipe = await readRecipe(await (await fetch(url)).blob());
    if (recipe === null) throw new Error("This file carries no recipe; PNGs do.");
    const { body, missing } = callOf(recipe);
    const isEdit = recipe.image_sha256 ?? recipe.references_sha256;
    const files = isEdit ? ["image", ...(recipe.mask_sha256 ? ["mask"] : [])] : [];
    return { body, files, missing };
  }

  /** @param {JobImage} image @param {number} index */
  async #again(image, index) {
    const url = fileUrl(this.#job?.data[index]?.url ?? "");
    await this.#try(async () => this.#tell("rc-again", await this.#callOf(image, url)));
  }

  /** @param {string} url */
  async #edit(url) {
    await this.#try(async () => this.#tell("rc-edit", await (await fetch(url)).blob()));
  }

  /** @param {string} title @param {typeof asCurl} write @param {JobImage} image @param {string} url */
  async #snippet(title, write, image, url) {
    await this.#try(async () => {
      const { body, files } = await this.#callOf(image, url);
      showSnippet(title, write(body, files));
    });
  }

  async #end() {
    const id = this.#job?.id ?? "";
    await this.#try(async () => this.show(await callJson(`v1/jobs/${encodeURIComponent(id)}`, { method: "DELETE" })));
  }

  /** @param {() => Promise<void>} work */
  async #try(work) {
    try {
      await work();
    } catch (error) {
      this.#fail(error);
    }
  }

  /** @param {unknown} error */
  #fail(error) {
    const text = error instanceof Error ? error.message : String(error);
    this.#notes.append(el("p", { class: "error", role: "alert" }, text));
  }

  /** @param {string} name @param {unknown} detail */
  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { bubbles: true, detail }));
  }
}

customElements.define("rc-run", Run);

/**
 * Have a job made, and return the element that shows it.
 *
 * @param {Sent} sent
 * @param {FormData} [form] the body of an edit
 * @param {AbortSignal} [signal]
 */
export async function begun(sent, form, signal) {
  const options = form ? { form } : { json: sent.body };
  /** @type {Job} */
  const job = await (await call("v1/jobs", { ...options, signal })).json();
  const run = new Run();
  run.sent = sent;
  run.show(job);
  return run;
}

/** Show a new run before the others, forget the oldest, and follow it.
 * @param {HTMLElement} list @param {Run} run */
export function shownFirst(list, run) {
  list.prepend(run);
  while (list.childElementCount > MOST_SHOWN) list.lastElementChild?.remove();
  // on a phone it comes below the form
  if (matchMedia("(max-width: 899px)").matches) run.scrollIntoView({ block: "nearest" });
  run.follow();
}

/** @param {Job} job */
function stateOf(job) {
  const left = job.predicted_finish === null ? "" : `, done in about ${duration(job.predicted_finish - Date.now() / 1000)}`;
  switch (job.state) {
    case "queued":
      if (!job.queue_position) return `next in the queue${left}`;
      return `${job.queue_position} before it in the queue${left}`;
    case "running":
      return `step ${job.step} of ${job.num_steps}${left}`;
    case "completed":
      return `done in ${duration((job.finished ?? job.created) - job.created)}${job.deadline.met === false ? ", too late" : ""}`;
    default:
      return job.state;
  }
}

/** @param {Job} job */
function notesOf(job) {
  const notes = job.warnings.map((text) => el("p", { class: "warning" }, text));
  if (job.error) notes.push(el("p", { class: "error" }, job.error.message));
  return notes;
}

/** A place of the image's shape, until there is something to see. @param {Job} job */
function blank(job) {
  const [width, height] = job.size.split("x");
  const place = el("div", { class: "blank" });
  place.style.setProperty("aspect-ratio", `${Number(width)} / ${Number(height)}`);
  return place;
}
