// The recipe that a PNG of the service carries, and the call that makes the image again.

/** @typedef {import("./types.js").Body} Body */

const PREFIX = "ray_cluster:";
const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];
const NUMBERS = ["num_inference_steps", "guidance_scale", "seed", "upscale", "lora_start_step"];
const EDIT_NUMBERS = ["strength", "feather_px"];
// what makes an image as it was made, beside these numbers
const TEXTS = ["model", "prompt", "negative_prompt", "size", "sampler"];

/**
 * Read a PNG's recipe.
 *
 * @param {Blob} file
 * @returns {Promise<Record<string, string> | null>} null where there is none
 */
export async function readRecipe(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (!SIGNATURE.every((byte, index) => bytes[index] === byte)) return null;
  const view = new DataView(bytes.buffer);
  /** @type {Record<string, string>} */
  const found = {};
  for (let at = 8; at + 12 <= bytes.length; ) {
    const length = view.getUint32(at);
    const kind = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    if (kind === "IDAT" || at + 12 + length > bytes.length) break;
    const [name, text] = textOf(kind, bytes.subarray(at + 8, at + 8 + length));
    if (name.startsWith(PREFIX)) found[name.slice(PREFIX.length)] = text;
    at += 12 + length;
  }
  return Object.keys(found).length ? found : null;
}

/** @param {string} kind @param {Uint8Array} data @returns {[string, string]} */
function textOf(kind, data) {
  const end = data.indexOf(0);
  if (end < 0 || (kind !== "tEXt" && kind !== "iTXt")) return ["", ""];
  const latin = new TextDecoder("latin1");
  const name = latin.decode(data.subarray(0, end));
  if (kind === "tEXt") return [name, latin.decode(data.subarray(end + 1))];
  // compression flag and method, then language and translated keyword, each ended by a zero
  const language = data.indexOf(0, end + 3);
  const keyword = data.indexOf(0, language + 1);
  if (data[end + 1] !== 0 || language < 0 || keyword < 0) return ["", ""];
  return [name, new TextDecoder().decode(data.subarray(keyword + 1))];
}

/**
 * Return the call of a recipe; what it says of images is their digests, which no call can name.
 *
 * @param {Record<string, string>} recipe
 * @returns {{body: Body, missing: string[]}} and the images that the user must give again
 */
export function callOf(recipe) {
  /** @type {Body} */
  const body = {};
  for (const name of TEXTS) if (recipe[name]) body[name] = recipe[name];
  for (const name of [...NUMBERS, ...EDIT_NUMBERS]) {
    if (recipe[name] && Number.isFinite(Number(recipe[name]))) body[name] = Number(recipe[name]);
  }
  const missing = [];
  if (recipe.seed && !Number.isSafeInteger(body.seed)) {
    delete body.seed;
    missing.push(`the seed ${recipe.seed}, which is too large for a browser`);
  }
  if (recipe.crop === "auto") body.crop = "auto";
  const loras = listOf(recipe.loras);
  const named = loras.filter((one) => typeof one.name === "string" && typeof one.scale === "number");
  if (named.length) body.loras = named.map(({ name, scale }) => ({ name, scale }));
  missing.push(...listOf(recipe.controlnets).map(({ name }) => `the map of ${typeof name === "string" ? name : "a ControlNet"}`));
  if (recipe.image_sha256) missing.push("the edited picture");
  if (recipe.mask_sha256) missing.push("the mask");
  if (recipe.references_sha256 && !recipe.image_sha256) missing.push("the pictures that the model looks at");
  return { body, missing };
}

/** @param {string | undefined} text @returns {Array<Record<string, unknown>>} */
function listOf(text) {
  try {
    const found = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? found.filter((one) => one !== null && typeof one === "object") : [];
  } catch {
    return [];
  }
}
