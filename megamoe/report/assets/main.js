'use strict';
// The page's state: the address keeps part of it, and a change redraws what depends on it.

const VIEWS = [
  ['matrix', 'matrix', matrixView],
  ['times', 'times', performanceView],
  ['comparison', 'comparison', comparisonView],
  ['coverage', 'VM coverage', coverageView],
  ['runs', 'runs', runsView],
];
const KEPT = ['view', 'measure', 'op', 'backend', 'target', 'executor', 'order', 'temperature', 'sort'];

const state = {
  view: 'matrix',
  measure: 'verdict',
  op: null,
  backend: null,
  target: null,
  executor: null,
  schedule: null,
  order: 'subject',
  temperature: 'cold',
  sort: 'lowest',
  filter: [],
  open: null,
  detailSchedule: null,
  focus: null,
  theme: 'auto',
  folds: false,
  calls: Object.keys(DATA.comparison?.counts ?? {}).filter((call) => call !== 'SAME'),
};

const DRAWN_APART = ['open', 'detailSchedule'];

// Changes the state and redraws what depends on it. The focus stays on its element if that still exists.
function set(changes) {
  Object.assign(state, changes);
  if ('open' in changes && !('detailSchedule' in changes)) state.detailSchedule = null;
  if (Object.keys(changes).every((name) => DRAWN_APART.includes(name))) markOpen();
  else draw();
  showDetail();
  keepAddress();
}

function markOpen() {
  for (const node of document.querySelectorAll('#main [data-cell]'))
    node.classList.toggle('open', node.dataset.cell === state.open);
}

function focusMark() {
  const node = document.activeElement;
  if (node?.dataset?.cell) return `#main ${node.tagName.toLowerCase()}[data-cell="${CSS.escape(node.dataset.cell)}"]`;
  const group = node?.closest?.('[data-choice]');
  return group
    ? `[data-choice="${CSS.escape(group.dataset.choice)}"] [data-value="${CSS.escape(node.dataset.value)}"]`
    : null;
}

function draw() {
  const mark = focusMark();
  const main = document.getElementById('main');
  const top = main.scrollTop;
  main.replaceChildren(
    ...VIEWS.find(([name]) => name === state.view)[2]()
      .flat(Infinity)
      .filter(Boolean),
  );
  main.scrollTop = top;
  const first =
    main.querySelector(`td[data-cell="${CSS.escape(state.focus ?? '')}"]`) ?? main.querySelector('td[data-cell]');
  if (first) first.tabIndex = 0;
  if (mark) document.querySelector(mark)?.focus();
  for (const tab of document.querySelectorAll('[role="tab"]')) {
    tab.setAttribute('aria-selected', String(tab.dataset.view === state.view));
    tab.tabIndex = tab.dataset.view === state.view ? 0 : -1;
  }
  showMatches();
}

function showMatches() {
  const count = [...cells.values()].filter((cell) => matches(cell, state.filter)).length;
  document.getElementById('matches').textContent = state.filter.length ? `${plain(count)} of ${plain(cells.size)}` : '';
}

function closeDetail() {
  const back = state.open;
  set({ open: null });
  (document.querySelector(`#main [data-cell="${CSS.escape(back ?? '')}"]`) ?? document.getElementById('main')).focus();
}

function setFilter(text) {
  document.getElementById('filter').value = text;
  set({ filter: words(text) });
}

function addressOf(cell) {
  return [DATA.cases[cell.caseIndex], ...DATA.subjects[cell.subject]].join(' ');
}

function keepAddress() {
  const kept = new URLSearchParams(KEPT.filter((name) => state[name] !== null).map((name) => [name, state[name]]));
  if (state.filter.length) kept.set('filter', state.filter.join(' '));
  if (state.open !== null) kept.set('row', addressOf(cells.get(state.open)));
  try {
    history.replaceState(null, '', `#${kept}`);
  } catch {
    /* the page may have no address */
  }
}

function fromAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  const known = {
    view: VIEWS.map(([name]) => name),
    measure: [...measures.keys()],
    order: ['subject', 'row'],
    temperature: ['cold', 'hot'],
    sort: SORTS.map(([name]) => name),
    op: Object.keys(DATA.ops),
  };
  SUBJECT_PARTS.forEach((part, at) => {
    known[part] = partValues(at);
  });
  for (const name of KEPT) if (known[name].includes(kept.get(name))) state[name] = kept.get(name);
  state.filter = words(kept.get('filter') ?? '');
  document.getElementById('filter').value = state.filter.join(' ');
  state.open = [...cells.values()].find((cell) => addressOf(cell) === kept.get('row'))?.key ?? null;
}

function makeTabs() {
  const tabs = VIEWS.map(([name, label], at) =>
    el(
      'button',
      {
        type: 'button',
        role: 'tab',
        'data-view': name,
        'aria-controls': 'main',
        title: `key ${at + 1}`,
        onclick: () => set({ view: name }),
      },
      label,
    ),
  );
  const bar = document.getElementById('tabs');
  bar.append(...tabs);
  bar.addEventListener('keydown', (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });
}

function listen() {
  document.addEventListener('keydown', onKey);
  document.getElementById('theme').addEventListener('click', nextTheme);
  document.getElementById('help').addEventListener('click', showKeys);
  document.getElementById('filter').addEventListener('input', (event) => set({ filter: words(event.target.value) }));
  document.getElementById('main').addEventListener('click', (event) => {
    const node = event.target.closest('td[data-cell]');
    if (!node) return;
    focusCell(node);
    set({ open: node.dataset.cell });
  });
  // The first call reports the size at which the page was drawn.
  let width = null;
  new ResizeObserver(([entry]) => {
    width ??= entry.contentRect.width;
    if (Math.abs(entry.contentRect.width - width) < 40) return;
    width = entry.contentRect.width;
    if (state.view === 'matrix' || state.view === 'times') requestAnimationFrame(draw);
  }).observe(document.getElementById('main'));
}

document.getElementById('provenance').append(...provenance());
document.getElementById('notes').append(...DATA.notes.map((note) => el('p', { role: 'note' }, note)));
makeTabs();
fromAddress();
listen();
showTheme(storedTheme());
draw();
showDetail();
