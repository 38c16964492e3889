// Starts the page: its sections, and what passes between them.

import { find, el } from "./base/dom.js";
import { forgetKey, show as showKey } from "./base/key.js";
import { Offer } from "./base/models.js";
import { CellView } from "./cell/cell.js";
import { Edit } from "./edit/edit.js";
import { Make } from "./make/make.js";
import { JobList } from "./jobs/jobs.js";

const SECTIONS = ["make", "edit", "jobs", "cell"];

/** Called when a section comes into view, and when it goes. @type {Record<string, {shown?: () => void, hidden?: () => void}>} */
const parts = {};

/** The section that the address names. */
function current() {
  const name = location.hash.slice(1);
  return SECTIONS.includes(name) ? name : SECTIONS[0];
}

function showSection() {
  const shown = current();
  for (const name of SECTIONS) {
    const isShown = name === shown;
    const section = find(document, `#section-${name}`, HTMLElement);
    const link = find(document, `nav a[href="#${name}"]`, HTMLAnchorElement);
    if (isShown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    section.hidden = !isShown;
    if (isShown) document.title = `${link.textContent} · ray-cluster`;
    if (isShown) parts[name]?.shown?.();
    else parts[name]?.hidden?.();
  }
}

/** @param {string} name of a section */
function goTo(name) {
  location.hash = name;
  // before anything in it takes the focus
  showSection();
}

/** @param {unknown} error */
function fail(error) {
  const text = error instanceof Error ? error.message : String(error);
  const again = el("button", { type: "button", click: () => location.reload() }, "Try again");
  find(document, "#failure", HTMLElement).replaceChildren(el("p", { class: "error", role: "alert" }, text), again);
}

async function start() {
  showKey();
  find(document, "#forget", HTMLButtonElement).addEventListener("click", () => {
    forgetKey();
    location.reload();
  });
  const offered = await Offer.fetch();
  const make = new Make(
    find(document, "#make", HTMLFormElement),
    find(document, "#made", HTMLElement),
    offered,
  );
  const edit = new Edit(
    find(document, "#edit", HTMLFormElement),
    find(document, "#edited", HTMLElement),
    offered,
  );
  parts.jobs = new JobList(find(document, "#section-jobs", HTMLElement));
  parts.cell = new CellView(find(document, "#section-cell", HTMLElement));
  document.addEventListener("rc-again", (event) => {
    const { body, files, missing } = /** @type {CustomEvent} */ (event).detail;
    goTo(files.length ? "edit" : "make");
    if (files.length) edit.fill(body, missing);
    else make.fill(body, missing);
  });
  document.addEventListener("rc-edit", (event) => {
    goTo("edit");
    edit.start(/** @type {CustomEvent} */ (event).detail);
  });
  addEventListener("hashchange", showSection);
  find(document, "main", HTMLElement).hidden = false;
  showSection();
}

// a file that is dropped beside a form must not replace the page
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
start().catch(fail);
