// The section Jobs: those of this key, the newest first; they are the service's, so a reload keeps them.

import { callJson } from "../base/api.js";
import { find, say } from "../base/dom.js";
import { isOver } from "./follow.js";
import { Run } from "./run.js";

/** @typedef {import("../base/types.js").Job} Job */

const PAGE = 20;

export class JobList {
  #last = "";
  #number = 0;

  /** @param {HTMLElement} section */
  constructor(section) {
    this.list = find(section, "#jobs-list", HTMLElement);
    this.note = find(section, "#jobs-note", HTMLElement);
    this.more = find(section, "#jobs-more", HTMLButtonElement);
    this.state = find(section, "#jobs-state", HTMLSelectElement);
    this.more.addEventListener("click", () => this.#load(this.#last));
    this.state.addEventListener("change", () => this.shown());
    find(section, "#jobs-again", HTMLButtonElement).addEventListener("click", () => this.shown());
  }

  /** Show the newest ones, and follow those that are not over while they are in view. */
  shown() {
    this.list.replaceChildren();
    this.more.hidden = true;
    this.#load("");
  }

  hidden() {
    this.#number += 1;
    this.list.replaceChildren();
  }

  /** @param {string} after */
  async #load(after) {
    const number = ++this.#number;
    say(this.note, "…");
    const query = new URLSearchParams({ limit: String(PAGE) });
    if (this.state.value) query.set("state", this.state.value);
    if (after) query.set("after", after);
    try {
      /** @type {{data: Job[], last_id: string | null, has_more: boolean}} */
      const page = await callJson(`v1/jobs?${query}`);
      if (number !== this.#number) return;
      this.#last = page.last_id ?? "";
      this.more.hidden = !page.has_more;
      for (const job of page.data) this.#add(job);
      say(this.note, this.list.childElementCount ? "" : "No jobs.");
    } catch (error) {
      if (number === this.#number) say(this.note, error instanceof Error ? error.message : String(error));
    }
  }

  /** @param {Job} job */
  #add(job) {
    const run = new Run();
    run.show(job);
    this.list.append(run);
    if (!isOver(job)) run.follow();
  }
}
