// Follows a job until it ends: by its stream of events, or by asking where streams are short.

import { ApiError, callJson, events } from "../base/api.js";

/** @typedef {import("../base/types.js").Job} Job */

// browsers open six connections to a host that speaks HTTP/1.1, and calls need some
const MOST_STREAMS = 3;
const ASK_EVERY_MS = 2000;
const LONGEST_PAUSE_MS = 15000;

let numStreams = 0;

/** @param {Job} job */
export const isOver = (job) => !["queued", "running"].includes(job.state);

/**
 * Yield a job whenever something of it is new, at last as it ended.
 *
 * @param {string} id
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Job>}
 */
export async function* followed(id, signal) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  let lastId = "";
  for (let pauseMs = 500; !signal.aborted; ) {
    try {
      if (numStreams < MOST_STREAMS) {
        let isLast = false;
        for await (const event of stream(path, signal, lastId)) {
          lastId = event.id;
          pauseMs = 500;
          // the service ends the stream by itself after it
          isLast = isOver(event.data);
          yield event.data;
        }
        if (isLast) return;
      } else pauseMs = ASK_EVERY_MS;
      /** @type {Job} */
      const job = await callJson(path, { signal });
      yield job;
      if (isOver(job)) return;
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError) || [401, 403, 404].includes(error.status)) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
    pauseMs = Math.min(pauseMs * 2, LONGEST_PAUSE_MS);
  }
}

/** @param {string} path @param {AbortSignal} signal @param {string} lastId */
async function* stream(path, signal, lastId) {
  numStreams += 1;
  try {
    yield* events(`${path}/events`, { signal, lastId });
  } finally {
    numStreams -= 1;
  }
}
