// Elements out of names and texts. All text goes through textContent: what a model or a client wrote is never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`text` and `class` too) and children. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "text") made.textContent = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Sets a text only if it changed: screen readers and layout are told of no change that is none. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A canvas as sharp as the screen, with a context in CSS pixels. */
export function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

let palette = {};
const forget = () => (palette = {});
document.addEventListener("themechange", forget);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);

/** A colour of the theme, for what is drawn and not styled: `colour("--draft")`. */
export function colour(name) {
  return (palette[name] ??= resolve(name));
}

function resolve(name) {
  const probe = element("span", { hidden: true });
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color; // light-dark() in a variable is resolved only where it is used
  probe.remove();
  return resolved;
}

export const MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
