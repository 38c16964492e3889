// Calls of the API: beside the page, below whatever path the page is served at.

import { askKey, storedKey } from "./key.js";

/** Where the service is: the folder of the page. */
export const BASE = new URL("./", document.baseURI);

const FILE = /^img-[0-9a-f]{32}(-[0-9])?\.(png|jpeg|webp)$/;
// longer events than any of the service's mean that something else answers
const MAX_EVENT_CHARS = 1 << 24;

/** An error as the service words it. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 where nothing answered
   * @param {string} message
   * @param {{code?: string | null, param?: string | null}} [more]
   */
  constructor(status, message, more = {}) {
    super(message);
    this.status = status;
    this.code = more.code ?? null;
    this.param = more.param ?? null;
  }
}

/**
 * @typedef {object} CallOptions
 * @property {string} [method]
 * @property {unknown} [json] the body
 * @property {FormData} [form] the body
 * @property {AbortSignal} [signal]
 * @property {Record<string, string>} [headers]
 */

/**
 * Call the service; without a valid key the user is asked for one, and the call is made again.
 *
 * @param {string} path such as `v1/jobs`
 * @param {CallOptions} [options]
 * @returns {Promise<Response>} a good one
 * @throws {ApiError} for all others
 */
export async function call(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const reply = await fetched(path, options, key);
    if (reply.ok) return reply;
    const error = await errorOf(reply);
    if (reply.status !== 401 || !(await askKey(key, error.message))) throw error;
  }
}

/** @param {string} path @param {CallOptions} options @param {string} key */
async function fetched(path, { method, json, form, signal, headers = {} }, key) {
  const all = { ...headers };
  if (key) all.Authorization = `Bearer ${key}`;
  if (json !== undefined) all["Content-Type"] = "application/json";
  const body = json === undefined ? form : JSON.stringify(json);
  try {
    return await fetch(new URL(path, BASE), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      body,
      signal,
      headers: all,
      credentials: "omit",
      redirect: "error",
      cache: "no-store",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The service does not answer. Does it run?");
  }
}

/** @param {Response} reply */
async function errorOf(reply) {
  try {
    const { error } = await reply.json();
    return new ApiError(reply.status, String(error.message), error);
  } catch {
    return new ApiError(reply.status, `The service answered with status ${reply.status}.`);
  }
}

/**
 * @template T
 * @param {string} path
 * @param {CallOptions} [options]
 * @returns {Promise<T>}
 */
export async function callJson(path, options) {
  return (await call(path, options)).json();
}

/** @typedef {{id: string, event: string, data: any}} ServerEvent */

/**
 * Yield the events of a stream (SSE) until it ends.
 *
 * @param {string} path
 * @param {{signal?: AbortSignal, lastId?: string}} [options]
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* events(path, { signal, lastId } = {}) {
  const headers = lastId ? { "Last-Event-ID": lastId } : undefined;
  const reply = await call(path, { signal, headers });
  if (reply.body === null) return;
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let isDone = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      isDone = done;
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const parts = rest.split("\n\n");
      rest = parts.pop() ?? "";
      if (rest.length > MAX_EVENT_CHARS) throw new ApiError(0, "An event has no end.");
      for (const part of parts) {
        const event = parsed(part);
        if (event !== null) yield event;
      }
    }
  } finally {
    if (!isDone) await reader.cancel().catch(() => undefined);
  }
}

/** @param {string} text @returns {ServerEvent | null} */
function parsed(text) {
  const found = { id: "", event: "message", data: "" };
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") found.data += value;
    else if (name === "id" || name === "event") found[name] = value;
  }
  // comments keep a connection open
  return found.data ? { ...found, data: JSON.parse(found.data) } : null;
}

/**
 * Where an image is: as near as the page, whatever address the service has for itself.
 *
 * @param {string} url in a reply
 * @returns {string} empty for anything else
 */
export function fileUrl(url) {
  const name = url.split("/").pop() ?? "";
  return FILE.test(name) ? new URL(`v1/files/${name}`, BASE).href : "";
}

/**
 * Upload an image for later calls.
 *
 * @param {Blob} image
 * @returns {Promise<string>} its id
 */
export async function upload(image) {
  const form = new FormData();
  form.append("purpose", "vision");
  form.append("file", image, "image");
  /** @type {{id: string}} */
  const reply = await callJson("v1/files", { form });
  return reply.id;
}

/** @param {string} text of base64 @param {string} type */
export function blobOf(text, type) {
  return new Blob([Uint8Array.from(atob(text), (char) => char.charCodeAt(0))], { type });
}
