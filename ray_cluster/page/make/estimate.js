// When a call would be done, said before it is made: asked for seldom, one at a time.

import { ApiError, callJson } from "../base/api.js";
import { duration, say } from "../base/dom.js";

/** @typedef {import("../base/types.js").Body} Body */
/** @typedef {import("../base/types.js").Estimate} Estimate */

const PAUSE_MS = 500;

export class Estimates {
  #timer = 0;
  #asking = false;
  #isStale = false;
  #isOffered = true;

  /** @param {HTMLElement} line @param {() => Body} body the call as it is now */
  constructor(line, body) {
    this.line = line;
    this.body = body;
  }

  /** The call has changed. */
  later() {
    if (!this.#isOffered) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), PAUSE_MS);
  }

  async #ask() {
    this.#isStale = this.#asking;
    if (this.#asking) return;
    const body = this.body();
    if (!body.prompt) return this.#show("");
    this.#asking = true;
    try {
      /** @type {Estimate} */
      const found = await callJson("v1/images/estimate", { json: body });
      this.#show(wordsOf(found));
    } catch (error) {
      const status = error instanceof ApiError ? error.status : 0;
      // a service of an earlier release, or one that this page may not ask so often
      this.#isOffered = ![403, 404, 405].includes(status);
      this.#show(status === 400 && error instanceof Error ? error.message : "");
    } finally {
      this.#asking = false;
    }
    if (this.#isStale) this.later();
  }

  /** @param {string} text */
  #show(text) {
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
