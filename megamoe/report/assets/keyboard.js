'use strict';
// Keys, the help about them, and the theme.

const KEYS = [
  ['← → ↑ ↓', 'move in the heat map'],
  ['Home End', 'first and last cell of a line'],
  ['Enter', 'open the row'],
  ['n  N', 'next and previous row that did not pass'],
  ['Escape', 'close the row, or clear the filter'],
  ['/', 'filter: words, axis=value, -word'],
  ['m', 'next measure'],
  ['1 … 5', 'views'],
  ['d', 'dark or light'],
  ['?', 'these keys'],
];

function focusCell(node) {
  if (!node) return;
  for (const other of document.querySelectorAll('#main td[tabindex="0"]')) other.tabIndex = -1;
  node.tabIndex = 0;
  node.focus();
  node.scrollIntoView({ block: 'nearest', inline: 'nearest' });
  state.focus = node.dataset.cell;
}

function currentCell() {
  const node = document.activeElement;
  return node?.matches?.('#main td[data-cell]')
    ? node
    : document.querySelector(`#main td[data-cell="${CSS.escape(state.focus ?? '')}"]`);
}

function nearest(line, from) {
  const middle = (node) => {
    const box = node.getBoundingClientRect();
    return box.left + box.width / 2;
  };
  return line.reduce((one, other) =>
    Math.abs(middle(other) - middle(from)) < Math.abs(middle(one) - middle(from)) ? other : one,
  );
}

function moveFocus(key) {
  const lines = cellLines(),
    from = currentCell();
  if (!lines.length) return;
  const row = lines.findIndex((line) => line.includes(from));
  if (row < 0) return void focusCell(lines[0][0]);
  const line = lines[row],
    at = line.indexOf(from);
  const moves = {
    ArrowLeft: () => line[at - 1],
    ArrowRight: () => line[at + 1],
    Home: () => line[0],
    End: () => last(line),
    ArrowUp: () => lines[row - 1] && nearest(lines[row - 1], from),
    ArrowDown: () => lines[row + 1] && nearest(lines[row + 1], from),
  };
  focusCell(moves[key]() ?? from);
  if (state.open !== null) set({ open: state.focus });
}

// Focuses the next cell, in reading order, whose row did not pass.
function moveToFailure(step) {
  const nodes = cellLines().flat();
  const bad = nodes.filter((node) => worst(newest(cells.get(node.dataset.cell), null))?.status !== 'passed');
  if (!bad.length) return;
  const at = nodes.indexOf(currentCell());
  const ahead =
    step > 0 ? bad.find((node) => nodes.indexOf(node) > at) : bad.findLast((node) => nodes.indexOf(node) < at);
  focusCell(ahead ?? (step > 0 ? bad[0] : last(bad)));
}

const THEMES = ['auto', 'dark', 'light'];

function showTheme(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById('theme').textContent = `theme: ${theme}`;
  state.theme = theme;
  try {
    localStorage.setItem('megamoe-theme', theme);
  } catch {
    /* a page from a file may have no storage */
  }
}

function storedTheme() {
  try {
    return THEMES.find((theme) => theme === localStorage.getItem('megamoe-theme')) ?? 'auto';
  } catch {
    return 'auto';
  }
}

function nextTheme() {
  showTheme(THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length]);
}

function showKeys() {
  const dialog = document.getElementById('keys');
  dialog.replaceChildren(
    el('h2', { id: 'keys-title' }, 'Keys'),
    el(
      'dl',
      {},
      KEYS.map(([key, meaning]) => [el('dt', {}, el('kbd', {}, key)), el('dd', {}, meaning)]),
    ),
    el('button', { type: 'button', onclick: () => dialog.close() }, 'close'),
  );
  dialog.showModal();
}

function nextMeasure() {
  const usable = DATA.measures.filter((measure) => subjectsWith(measure, null).size).map((measure) => measure.name);
  set({ measure: usable[(usable.indexOf(state.measure) + 1) % usable.length] });
}

function escape() {
  if (state.open !== null) closeDetail();
  else if (document.getElementById('filter').value) {
    setFilter('');
    document.getElementById('filter').blur();
  } else document.activeElement?.blur();
}

const COMMANDS = {
  Escape: escape,
  n: () => moveToFailure(1),
  N: () => moveToFailure(-1),
  m: nextMeasure,
  d: nextTheme,
  '?': showKeys,
  '/': () => document.getElementById('filter').focus(),
};

const MOVES = ['ArrowLeft', 'ArrowRight', 'ArrowUp', 'ArrowDown', 'Home', 'End'];

// The command for a key on this element, or null.
function commandOf(key, target) {
  if (target.matches('input')) return key === 'Escape' ? escape : null;
  if (key === 'Enter' && target.matches('#main td[data-cell]')) return () => set({ open: target.dataset.cell });
  if (MOVES.includes(key)) {
    const elsewhere = state.view !== 'matrix' || target.closest('[role="tab"], #detail');
    return elsewhere ? null : () => moveFocus(key);
  }
  const view = /^[1-9]$/.test(key) && VIEWS[key - 1];
  return view ? () => set({ view: view[0] }) : COMMANDS[key];
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById('keys').open) return;
  const command = commandOf(event.key, event.target);
  if (!command) return;
  command();
  event.preventDefault();
}
