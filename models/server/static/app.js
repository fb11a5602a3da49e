"use strict";

const byId = (id) => document.getElementById(id);

// --- requests

const key = byId("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => { sessionStorage.setItem("key", key.value); loadModel(); });

function headers(more) {
  return key.value ? { ...more, Authorization: `Bearer ${key.value}` } : { ...more };
}

async function errorOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text}`.trim();
  }
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function loadModel() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    byId("model").textContent = response.ok ? (await response.json()).data[0].id : await errorOf(response);
  } catch (error) {
    byId("model").textContent = String(error);
  }
}

// --- chat

const messages = []; // as in the requests, without the system prompt
let pending = []; // tool calls without results
let running = null; // AbortController of the running request

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

const log = byId("messages");

function append(parent, child) {
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  parent.append(child);
  if (follows) log.scrollTop = log.scrollHeight;
}

function showMessage(role) {
  const shown = element("div", `message ${role}`);
  shown.append(element("p", "role", role));
  append(log, shown);
  log.scrollTop = log.scrollHeight;
  return shown;
}

/** Shows a message of the model while it arrives, and collects it. */
class Answer {
  constructor() {
    this.shown = showMessage("assistant");
    this.message = { role: "assistant", content: "" };
    this.texts = {};
    this.calls = [];
  }

  text(name, make) {
    if (!this.texts[name]) {
      this.texts[name] = document.createTextNode("");
      append(this.shown, make(this.texts[name]));
    }
    return this.texts[name];
  }

  extend(node, text) {
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    node.data += text;
    if (follows) log.scrollTop = log.scrollHeight;
  }

  add(delta) {
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) {
      this.extend(this.text("reasoning", (node) => {
        const folded = element("details", "");
        const body = element("div", "text");
        body.append(node);
        folded.append(element("summary", "", "Reasoning"), body);
        return folded;
      }), reasoning);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.extend(this.text("content", (node) => {
        const body = element("div", "text");
        body.append(node);
        return body;
      }), delta.content);
    }
    for (const call of delta.tool_calls ?? []) this.addCall(call);
  }

  addCall(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      call = { id: delta.id, type: "function", function: { name: delta.function.name, arguments: "" } };
      this.calls[delta.index] = call;
    }
    call.function.arguments += delta.function?.arguments ?? "";
    const node = this.text(`call ${delta.index}`, (text) => {
      const body = element("div", "call text");
      body.append(`${call.function.name} `, text);
      return body;
    });
    this.extend(node, delta.function?.arguments ?? "");
  }

  note(text, className = "note") {
    append(this.shown, element("p", className, text));
  }

  /** Adds the message to the conversation. */
  keep(isWhole) {
    const calls = isWhole ? this.calls.filter(Boolean) : [];
    if (!this.message.content && !calls.length) return;
    if (calls.length) this.message.tool_calls = calls;
    messages.push(this.message);
    pending = calls.map((call) => call.id);
    byId("input").placeholder = pending.length ? `Result of ${calls[0].function.name}` : "Message";
  }
}

function requestBody() {
  const body = { messages: [...messages], stream: true, stream_options: { include_usage: true } };
  const system = byId("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"], ["max-tokens", "max_tokens"]]) {
    if (byId(id).value !== "") body[name] = Number(byId(id).value);
  }
  if (byId("tools").value.trim()) body.tools = JSON.parse(byId("tools").value);
  return JSON.stringify(body);
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = controller !== null;
  byId("stop").disabled = controller === null;
  log.setAttribute("aria-busy", String(controller !== null));
}

async function answer() {
  const reply = new Answer();
  const controller = new AbortController();
  setRunning(controller);
  const started = performance.now();
  let isWhole = false;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: requestBody(),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error(await errorOf(response));
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices ?? []) {
        reply.add(choice.delta);
        if (choice.finish_reason) isWhole = true;
        if (choice.finish_reason === "length") reply.note("The limit on tokens ended the answer.");
      }
      if (event.usage) {
        const seconds = (performance.now() - started) / 1000;
        const { prompt_tokens: before, completion_tokens: made } = event.usage;
        reply.note(`${before} prompt tokens, ${made} generated tokens, ${(made / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (!isWhole) throw new Error("The connection has ended before the answer.");
  } catch (error) {
    if (error.name === "AbortError") reply.note("Stopped.");
    else reply.note(error.message, "error");
  } finally {
    if (running === controller) {
      reply.keep(isWhole);
      setRunning(null);
      byId("input").focus();
    }
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = byId("input").value.trim();
  if (!content || running) return;
  byId("input").value = "";
  const message = pending.length ? { role: "tool", tool_call_id: pending.shift(), content } : { role: "user", content };
  messages.push(message);
  showMessage(message.role).append(element("div", "text", content));
  if (!pending.length) {
    byId("input").placeholder = "Message";
    answer();
  }
});

byId("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());

byId("clear").addEventListener("click", () => {
  running?.abort();
  setRunning(null);
  messages.length = 0;
  pending = [];
  log.replaceChildren();
  byId("input").placeholder = "Message";
  byId("input").focus();
});

// --- charts

const SECONDS = 120;
const samples = []; // of the last SECONDS: { time in ms, requests, ... }

const percent = (share) => `${(100 * share).toFixed(1)} %`;

const CHARTS = [
  { id: "requests", title: "Requests", unit: "", lines: ["running", "waiting"], least: 4 },
  { id: "tokens", title: "Generated tokens per second", unit: " tokens/s", lines: ["tokens"], least: 10 },
  { id: "pages", title: "KV cache pages in use", unit: " %", lines: ["pages"], most: 100, scale: 100 },
  { id: "hits", title: "Prompt tokens found in the prefix cache", unit: " %", lines: ["hits"], most: 100, scale: 100 },
];

const VALUES = {
  running: (value) => String(value),
  waiting: (value) => String(value),
  tokens: (value) => `${value.toFixed(1)} tokens/s`,
  pages: percent,
  hits: percent,
};

function metricsOf(text) {
  const sums = {};
  for (const line of text.split("\n")) {
    const found = /^pallas_attn_(\w+)(?:\{[^}]*\})? (\S+)/.exec(line);
    if (found) sums[found[1]] = (sums[found[1]] ?? 0) + Number(found[2]);
  }
  return sums;
}

async function sample() {
  const response = await fetch("/metrics", { headers: headers(), signal: AbortSignal.timeout(5000) });
  if (!response.ok) throw new Error(await errorOf(response));
  const metrics = metricsOf(await response.text());
  const time = performance.now();
  const generated = metrics.generation_tokens_total ?? 0;
  const last = samples.at(-1);
  const tokens = last ? Math.max(0, generated - last.generated) / ((time - last.time) / 1000) : 0;
  samples.push({
    time,
    generated,
    tokens,
    running: metrics.num_requests_running ?? 0,
    waiting: metrics.num_requests_waiting ?? 0,
    pages: metrics.kv_cache_usage_perc ?? 0,
    hits: metrics.prefix_cache_hit_rate ?? 0,
  });
  while (time - samples[0].time > 1000 * SECONDS) samples.shift();
}

function niceLimit(value) {
  const step = 10 ** Math.floor(Math.log10(value));
  return step * [1, 2, 5, 10].find((factor) => factor * step >= value);
}

function draw(chart) {
  const canvas = byId(`chart-${chart.id}`);
  const scale = devicePixelRatio;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const color = (name) => style.getPropertyValue(name).trim();
  const factor = chart.scale ?? 1;
  const highest = Math.max(chart.least ?? 0, ...samples.flatMap((s) => chart.lines.map((line) => s[line] * factor)));
  const most = chart.most ?? niceLimit(highest);
  const [left, right, top, bottom] = [2, width - 2, 16, height - 18];
  const y = (value) => bottom - (bottom - top) * Math.min(value / most, 1);
  context.font = "12px system-ui, sans-serif";
  context.strokeStyle = color("--line");
  context.fillStyle = color("--muted");
  for (const share of [0, 0.5, 1]) {
    context.beginPath();
    context.moveTo(left, y(share * most));
    context.lineTo(right, y(share * most));
    context.stroke();
  }
  context.fillText(`${most}${chart.unit}`, left, top - 4);
  for (const [share, align, text] of [[0, "left", "−2 min"], [0.5, "center", "−1 min"], [1, "right", "now"]]) {
    context.textAlign = align;
    context.fillText(text, left + share * (right - left), height - 4);
  }
  const now = performance.now();
  context.lineWidth = 2;
  chart.lines.forEach((line, i) => {
    context.strokeStyle = color(i ? "--second" : "--first");
    context.beginPath();
    for (const s of samples) context.lineTo(right - ((now - s.time) / 1000 / SECONDS) * (right - left), y(s[line] * factor));
    context.stroke();
  });
}

function drawAll() {
  const last = samples.at(-1);
  if (last) for (const [name, show] of Object.entries(VALUES)) byId(name).textContent = show(last[name]);
  for (const chart of CHARTS) {
    draw(chart);
    const values = chart.lines.map((line) => `${line}: ${byId(line).textContent}`).join(", ");
    byId(`chart-${chart.id}`).setAttribute("aria-label", `${chart.title} of the last 2 minutes. Now ${values}`);
  }
}

async function poll() {
  if (!document.hidden) {
    try {
      await sample();
      byId("state").textContent = "Connected";
      byId("state").className = "";
    } catch (error) {
      byId("state").textContent = `No metrics: ${error.message}`;
      byId("state").className = "error";
    }
    drawAll();
  }
  setTimeout(poll, 1000);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", drawAll);
loadModel();
poll();
