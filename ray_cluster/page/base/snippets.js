// The same call for a terminal and for a program.

import { BASE } from "./api.js";
import { storedKey } from "./key.js";
import { button, el } from "./dom.js";

/** @typedef {import("./types.js").Body} Body */

/** Python that saves what curl prints. @param {Body} body */
const saving = ({ output_format: kind = "png" }) => `import base64, json, sys
for number, image in enumerate(json.load(sys.stdin)["data"]):
    open(f"made-{number}.${kind}", "wb").write(base64.b64decode(image["b64_json"]))`;

/** @param {string} text in single quotes, for a shell */
export const shellQuoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** JSON that is Python as well: texts, numbers, lists. Control characters stay escaped.
 * @param {unknown} value @returns {string} */
function python(value) {
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one)}`).join(", ")}}`;
  }
  return value === null ? "None" : JSON.stringify(value);
}

/** @param {Body} body @returns {Body} without the wishes of the page itself */
function plain({ partial_images: _, ...rest }) {
  return rest;
}

/** @param {Body} body @param {string[]} files names of the parts that are files, for an edit */
export function asCurl(body, files) {
  const lines = [`curl -s ${new URL(files.length ? "v1/images/edits" : "v1/images/generations", BASE)}`];
  if (storedKey()) lines.push('-H "Authorization: Bearer $API_KEY"');
  const values = plain(body);
  if (files.length) {
    const pictures = files.filter((name) => name.startsWith("image")).length;
    lines.push(...files.map((name, index) => `-F '${name}=@${pictures > 1 && name !== "mask" ? `image-${index + 1}` : name}.png'`));
    // form-string: a text that begins with @ or < is one
    for (const [name, value] of Object.entries(values)) {
      lines.push(`--form-string ${shellQuoted(`${name}=${typeof value === "string" ? value : JSON.stringify(value)}`)}`);
    }
  } else {
    lines.push("-H 'Content-Type: application/json'", `-d ${shellQuoted(JSON.stringify(values))}`);
  }
  return `${lines.join(" \\\n    ")} \\\n  | python3 -c ${shellQuoted(saving(body))}`;
}

/** @param {Body} body @param {string[]} files */
export function asPython(body, files) {
  const { model, prompt, n, size, ...more } = plain(body);
  const isEdit = files.length > 0;
  const arguments_ = Object.entries({ model, prompt, n, size })
    .filter(([, value]) => value !== undefined)
    .map(([name, value]) => `    ${name}=${python(value)},`);
  const pictures = files.filter((name) => name.startsWith("image"));
  if (pictures.length > 1) {
    arguments_.unshift(`    image=[${pictures.map((_, index) => `open("image-${index + 1}.png", "rb")`).join(", ")}],`);
  } else if (isEdit) arguments_.unshift('    image=open("image.png", "rb"),');
  if (files.includes("mask")) arguments_.push('    mask=open("mask.png", "rb"),');
  const encoded = isEdit
    ? Object.fromEntries(Object.entries(more).map(([name, one]) => [name, typeof one === "object" ? JSON.stringify(one) : one]))
    : more;
  if (Object.keys(encoded).length) arguments_.push(`    extra_body=${python(encoded)},`);
  return [
    "import base64",
    ...(storedKey() ? ["import os"] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(new URL("v1", BASE).href)}, api_key=${storedKey() ? 'os.environ["API_KEY"]' : '"none"'})`,
    `reply = client.images.${isEdit ? "edit" : "generate"}(`,
    ...arguments_,
    ")",
    "for number, image in enumerate(reply.data):",
    `    open(f"made-{number}.${body.output_format ?? "png"}", "wb").write(base64.b64decode(image.b64_json))`,
  ].join("\n");
}

/** Show a text to copy. @param {string} title @param {string} text */
export function showSnippet(title, text) {
  const code = el("pre", { tabindex: "0", "aria-label": title }, text);
  const copied = el("span", { role: "status" });
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = "copied";
    } catch {
      // pages without TLS have no clipboard
      getSelection()?.selectAllChildren(code);
      copied.textContent = "selected: press Ctrl+C";
    }
  });
  const box = el("dialog", { class: "snippet", "aria-label": title });
  const close = button("Close", () => box.close());
  box.append(el("h2", {}, title), code, el("p", { class: "actions" }, copy, close, copied));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}
