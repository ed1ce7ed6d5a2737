'use strict';
// Makes elements. Text is inserted as text, never as markup: records may hold anything.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function picture(width, height, name, ...children) {
  return svg(
    'svg',
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      ...(name ? { role: 'img', 'aria-label': name } : { 'aria-hidden': 'true' }),
    },
    ...children,
  );
}

function plain(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (typeof value === 'string') return { NaN: 'NaN', Infinity: '∞', '-Infinity': '−∞' }[value] ?? value;
  if (Number.isInteger(value)) return value.toLocaleString('en-US').replaceAll(',', '\u202f');
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(digits - 1);
  return String(Number(value.toPrecision(digits)));
}

function micro(value) {
  return value >= 100 ? value.toFixed(0) : value.toPrecision(3);
}

const MAX_LETTERS = 90;

function clip(text) {
  return text.length > MAX_LETTERS ? `${text.slice(0, MAX_LETTERS - 1)}…` : text;
}

function plural(count, word) {
  return `${plain(count)} ${word}${count === 1 ? '' : 's'}`;
}

// A value in few characters, to fit a cell.
function brief(value, style) {
  const number = toNumber(value);
  if (Number.isNaN(number)) return 'NaN';
  if (!Number.isFinite(number)) return '∞';
  if (style === 'percent') return number === 0 ? '0' : number < 0.0095 ? '<1%' : `${Math.round(number * 100)}%`;
  if (number > 0 && number < 0.005) return '<.01';
  if (number >= 1000) return number.toExponential(0).replace('+', '');
  if (number >= 100) return number.toFixed(0);
  return number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

function copyButton(text) {
  const button = el('button', { type: 'button' }, 'copy');
  button.addEventListener('click', async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = 'copied';
    } catch {
      button.textContent = 'select it';
    }
  });
  return button;
}

// A row of buttons that choose one value; `null` means all.
function choice(name, options, chosen, choose) {
  const buttons = options.map(([value, label, title]) =>
    el(
      'button',
      {
        type: 'button',
        title,
        'aria-pressed': String(value === chosen),
        'data-value': value ?? '',
        onclick: () => choose(value),
      },
      label,
    ),
  );
  return el(
    'fieldset',
    { class: 'choice', 'data-choice': name },
    el('legend', {}, name),
    el('div', { class: 'options' }, buttons),
  );
}

// A group of choices in one line; folded on a narrow page, where it would fill the first screen.
function controls(name, ...choices) {
  const group = el('div', { class: 'controls', role: 'group', 'aria-label': name }, choices);
  if (!NARROW.matches) return group;
  const chosen = [...group.querySelectorAll('[data-choice] [aria-pressed="true"]')]
    .map((button) => button.textContent)
    .filter((text) => text !== 'all');
  const fold = el('details', { class: 'folds', open: state.folds }, el('summary', {}, `filters: ${chosen.join(' · ')}`), group);
  fold.addEventListener('toggle', () => {
    state.folds = fold.open;
  });
  return fold;
}

const NARROW = window.matchMedia('(max-width: 700px)');

// Details whose content is made on first opening.
function lazily(attributes, title, make) {
  const fold = el('details', attributes, el('summary', {}, title));
  fold.addEventListener('toggle', () => fold.open && fold.children.length === 1 && fold.append(make()));
  return fold;
}

// A name ending in # marks a column of numbers, in ! a column that a narrow page omits, in * a column of code.
function columnClass(column) {
  return { '#': 'number', '!': 'number wide-only', '*': 'mono' }[last(column)] ?? null;
}

function rowsTable(name, columns, rows, className = 'list') {
  const head = columns.map((column) =>
    el(
      'th',
      { scope: 'col', class: columnClass(column)?.startsWith('number') ? columnClass(column) : null },
      column.replace(/[#*!]$/, ''),
    ),
  );
  const parts = [el('thead', {}, el('tr', {}, head)), el('tbody', {}, rows)];
  return el('div', { class: 'scroll' }, el('table', { class: className, 'aria-label': name }, parts));
}

function table(name, columns, rows, className) {
  const cell = (value, at) => el('td', { class: columnClass(columns[at]) }, value);
  const lines = rows.map((row) => el('tr', {}, row.map(cell)));
  return rowsTable(name, columns, lines, className);
}

function muted(text) {
  return el('p', { class: 'muted' }, text);
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== '');
  return el(
    'dl',
    { class: 'facts' },
    shown.map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]),
  );
}

function section(title, ...children) {
  return el('section', {}, el('h3', {}, title), ...children);
}
