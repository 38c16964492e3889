// When a call would be done, said before it is made: asked for seldom, one at a time.

import { ApiError, callJson } from "../base/api.js";
import { duration, say } from "../base/dom.js";

/** @typedef {import("../base/types.js").Body} Body */
/** @typedef {import("../base/types.js").Estimate} Estimate */

const PAUSE_MS = 500;
// so long an answer holds, whatever words are typed
const KEPT_MS = 5000;

export class Estimates {
  #timer = 0;
  #asking = false;
  #known = { about: "", until: 0 };
  #isOffered = true;

  /** @param {HTMLElement} line @param {() => Body} body the call as it is now */
  constructor(line, body) {
    this.line = line;
    this.body = body;
  }

  /** The call has changed. */
  later(waitMs = PAUSE_MS) {
    if (!this.#isOffered) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), waitMs);
  }

  async #ask() {
    if (this.#asking) return this.later();
    const body = this.body();
    if (!body.prompt) return this.#show("");
    const about = JSON.stringify({ ...body, prompt: "" });
    const leftMs = this.#known.until - performance.now();
    if (about === this.#known.about && leftMs > 0) return this.later(leftMs);
    this.#asking = true;
    try {
      this.#show(wordsOf(await callJson("v1/images/estimate", { json: body })));
      this.#known = { about, until: performance.now() + KEPT_MS };
    } catch (error) {
      const status = error instanceof ApiError ? error.status : 0;
      // a service of an earlier release, or one that this page may not ask so often
      this.#isOffered = ![403, 404, 405].includes(status);
      this.#show(status === 400 && error instanceof Error ? error.message : "");
    }
    this.#asking = false;
  }

  /** @param {string} text */
  #show(text) {
    this.#known.until = 0;
    say(this.line, text);
    this.line.hidden = !text;
  }
}

/** @param {Estimate} found */
function wordsOf(found) {
  if (!found.accepted || found.finish_in_s === null) return found.message ?? "";
  const late = found.in_time ? "" : `, after its deadline of ${duration(found.deadline_s ?? 0)}`;
  return `Done in about ${duration(found.finish_in_s)} with ${found.num_inference_steps} steps${late}.`;
}
