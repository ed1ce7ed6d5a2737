'use strict';
// Device times: a roofline, and for each case the share of the physical floor that each backend reaches.

const PLOT = { width: 860, height: 420, left: 62, right: 18, top: 22, bottom: 44 };

// The plot is as wide as the page allows.
function fitPlot() {
  PLOT.width = Math.max(300, (document.getElementById('main').clientWidth || 892) - 32);
  PLOT.height = PLOT.width < 600 ? 340 : 460;
  PLOT.left = PLOT.width < 600 ? 48 : 62;
}

// Device name -> its facts from the newest header.
function devices() {
  return new Map(DATA.runs.filter((run) => run.device).map((run) => [run.device.name, run.device]));
}

function deviceOf(timing) {
  return DATA.runs[runOrder.get(DATA.run_ids[timing.run])]?.device?.name ?? null;
}

// The newest passed timings that match the controls.
function shownTimings(op, device) {
  const found = [];
  for (const cell of cells.values()) {
    const timing = last(cell[state.temperature]);
    const admitted = SUBJECT_PARTS.every(
      (part, at) => state[part] === null || DATA.subjects[cell.subject][at] === state[part],
    );
    if (
      timing?.median &&
      opOf(cell.caseIndex) === op &&
      deviceOf(timing) === device &&
      admitted &&
      matches(cell, state.filter)
    )
      found.push({ cell, timing });
  }
  return found;
}

// A backend keeps its colour and marker under every filter, for every target and on every executor.
const TIMED = [
  ...new Set(
    [...cells.values()]
      .filter((cell) => cell.cold.length || cell.hot.length)
      .map((cell) => DATA.subjects[cell.subject][0]),
  ),
].sort(inOrder);

function seriesOf(subject) {
  return TIMED.indexOf(DATA.subjects[subject][0]);
}

function seriesLegend(subjects) {
  const { names, shared } = shortNames(subjects);
  const keys = subjects.map((subject) =>
    el('span', { class: 'key' }, picture(14, 14, '', marker(seriesOf(subject), 7, 7)), names.get(subject)),
  );
  return el('div', { class: 'legend' }, shared.length ? el('span', {}, `on ${shared.join(', ')}:`) : null, keys);
}

function placed({ cell, timing }) {
  const work = DATA.work[cell.caseIndex];
  if (!work || !work[0] || !work[1]) return null;
  return { cell, timing, x: work[0] / work[1], y: work[0] / timing.median / 1e6 };
}

function logBounds(values, wider) {
  return [Math.min(...values) / wider, Math.max(...values) * wider];
}

function axes(x, y, [left, right], [low, high]) {
  const { width, height, top, bottom } = PLOT;
  return [
    logTicks(left, right).map((value) => [
      svg('line', { class: 'grid', x1: x(value), x2: x(value), y1: top, y2: height - bottom }),
      svg('text', { class: 'value', x: x(value), y: height - bottom + 15, 'text-anchor': 'middle' }, plain(value)),
    ]),
    logTicks(low, high).map((value) => [
      svg('line', { class: 'grid', x1: PLOT.left, x2: width - PLOT.right, y1: y(value), y2: y(value) }),
      svg('text', { class: 'value', x: PLOT.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, plain(value)),
    ]),
    svg(
      'text',
      { x: width - PLOT.right, y: height - 8, 'text-anchor': 'end' },
      'arithmetic intensity, useful FLOP / minimum byte',
    ),
    svg('text', { x: PLOT.left, y: top - 8 }, 'achieved, useful TFLOP/s'),
  ];
}

// Ceilings measured in the same session: a copy's bandwidth and a matrix product's bf16 rate.
function roof(device, x, y, [left, right]) {
  const bytes = device.copy_bytes_per_s,
    peak = device.bf16_flops_per_s;
  if (!bytes && !peak) return [];
  const at = (intensity) => Math.min(bytes ? (intensity * bytes) / 1e12 : Infinity, peak ? peak / 1e12 : Infinity);
  const knee = bytes && peak ? peak / bytes : left;
  const points = [left, Math.max(left, Math.min(right, knee)), right].map(
    (value) => `${x(value).toFixed(1)},${y(at(value)).toFixed(1)}`,
  );
  const label = (value, text, anchor) => svg('text', { x: x(value), y: y(at(value)) - 6, 'text-anchor': anchor }, text);
  return [
    svg('polyline', { class: 'roof', points: points.join(' ') }),
    peak && right > knee ? label(right, `bf16 ${plain(peak / 1e12)} TFLOP/s, measured`, 'end') : null,
    bytes && left < knee
      ? svg('text', { x: x(left) + 30, y: y(at(left)) + 6 }, `copy ${plain(bytes / 1e12)} TB/s, measured`)
      : null,
  ];
}

function rooflineMark(point, x, y) {
  const { cell, timing } = point;
  const series = seriesOf(cell.subject);
  const told = [
    DATA.cases[cell.caseIndex],
    subjectName(cell.subject),
    `${micro(timing.median)} µs, ${plain(point.y)} TFLOP/s`,
  ];
  const mark = marker(series, x(point.x), y(point.y), 4.5, {
    'data-cell': cell.key,
    onclick: () => set({ open: cell.key }),
  });
  if (cell.key === state.open) mark.classList.add('open');
  mark.append(svg('title', {}, told.join('\n')));
  return mark;
}

function rooflinePicture(points, device, op) {
  const { width, height, left, right, top, bottom } = PLOT;
  const across = points.map((point) => point.x);
  const up = points.map((point) => point.y);
  const acrossRange = logBounds(across, 2);
  const upRange = logBounds(device.bf16_flops_per_s ? [...up, device.bf16_flops_per_s / 1e12] : up, 1.6);
  const x = logScale(...acrossRange, left, width - right);
  const y = logScale(...upRange, height - bottom, top);
  const area = `plot-${op}`;
  return picture(
    width,
    height,
    `Roofline, ${plural(points.length, 'point')}`,
    clipped(area),
    axes(x, y, acrossRange, upRange),
    points.map((point) => rooflineMark(point, x, y)),
    svg('g', { 'clip-path': `url(#${CSS.escape(area)})`, class: 'roofs' }, roof(device, x, y, acrossRange)),
  );
}

function roofline(shown, device, op) {
  const points = shown.map(placed).filter(Boolean);
  const missing = shown.length - points.length;
  if (!points.length) return muted('No record has the work of these cases, so that no roofline can be drawn.');
  return el(
    'figure',
    {},
    rooflinePicture(points, device, op),
    missing ? muted(`${plural(missing, 'timing')} of cases whose work no record has are left out`) : null,
  );
}

function clipped(id) {
  const { width, height, left, right, top, bottom } = PLOT;
  return svg(
    'clipPath',
    { id },
    svg('rect', { x: left, y: 0, width: width - left - right, height: height - bottom + top - top }),
  );
}

const SORTS = [
  ['matrix', 'matrix order'],
  ['lowest', 'lowest first'],
  ['gap', 'largest gap first'],
];

function sortedGroups(shown) {
  const groups = new Map();
  for (const one of shown) push(groups, one.cell.caseIndex, one);
  const fractions = (group) => group.map(({ timing }) => timingNumber(timing) ?? 1);
  const keys = {
    matrix: () => 0,
    lowest: (group) => Math.min(...fractions(group)),
    gap: (group) => Math.min(...fractions(group)) / Math.max(...fractions(group), 1e-9),
  };
  const ordered = [...groups.values()].sort((one, other) => keys[state.sort](one) - keys[state.sort](other));
  ordered.forEach((group) => group.sort((one, other) => one.timing.median - other.timing.median));
  return ordered;
}

// A row's medians over the runs, oldest first; empty for a row of one run.
function trend(cell) {
  const values = runs(cell[state.temperature]).map((one) => one.median).filter(Boolean);
  if (values.length < 2) return '';
  return [sparkline(values, `median over ${values.length} runs`, 70), el('small', {}, change(values))];
}

// The length of the bar is floor over time; the dashed line is at 1.
function floorTrack(fraction, series) {
  const whole = 1.1;
  const bar = el('span', { class: seriesLook(series) });
  bar.style.width = `${Math.min(1, (fraction ?? 0) / whole) * 100}%`;
  const floor = el('i');
  floor.style.left = `${100 / whole}%`;
  return el('div', { class: 'track' }, bar, floor);
}

function caseRow(cell) {
  const wide = el('th', { class: 'mono', colspan: BAR_COLUMNS.length, scope: 'rowgroup' }, clip(shortCase(cell.caseIndex)));
  return el('tr', { class: 'group' }, wide);
}

function floorRow({ cell, timing }, name) {
  const fraction = timingNumber(timing);
  const series = seriesOf(cell.subject);
  const number = (text) => el('td', { class: 'number' }, text);
  return openable(
    cell,
    el(
      'tr',
      {},
      el('td', { class: 'nowrap' }, picture(14, 12, '', marker(series, 7, 6, 4))),
      el('td', { class: 'nowrap' }, name),
      el('td', {}, floorTrack(fraction, series)),
      number(fraction === null ? '–' : brief(fraction)),
      number(micro(timing.median)),
      el('td', { class: 'number wide-only' }, `${micro(timing.low)} – ${micro(timing.high)}`),
      el('td', { class: 'number wide-only' }, floorText(timing)),
      el('td', { class: 'trend' }, trend(cell)),
    ),
  );
}

const BAR_COLUMNS = [
  '',
  '',
  'of the floor (dashed)',
  'floor / time#',
  'median µs#',
  '95% interval!',
  'floor µs!',
  'over runs',
];

function floorBars(shown) {
  const { names } = shortNames([...new Set(shown.map(({ cell }) => cell.subject))]);
  const rows = sortedGroups(shown).flatMap((group) => [
    caseRow(group[0].cell),
    ...group.map((one) => floorRow(one, names.get(one.cell.subject))),
  ]);
  return rowsTable('Achieved over floor', BAR_COLUMNS, rows, 'list bars');
}

// Makes a table row open the drawer by click or Enter.
function openable(cell, row) {
  row.tabIndex = 0;
  row.dataset.cell = cell.key;
  row.addEventListener('click', () => set({ open: cell.key }));
  row.addEventListener('keydown', (event) => event.key === 'Enter' && set({ open: cell.key }));
  return row;
}

function performanceOp(op, name, device) {
  const shown = shownTimings(op, name);
  if (!shown.length) return null;
  const launchBound = shown.filter(({ timing }) => isLaunchBound(timing)).length;
  const subjects = [...new Set(shown.map(({ cell }) => cell.subject))].sort(
    (one, other) => seriesOf(one) - seriesOf(other),
  );
  return el(
    'section',
    { class: 'op' },
    el(
      'h2',
      {},
      op,
      ' ',
      el('small', {}, `${name ?? 'device unknown'}, ${state.temperature}, ${plural(shown.length, 'timing')}`),
    ),
    seriesLegend(subjects),
    device ? roofline(shown, device, op) : null,
    launchBound
      ? muted(
          `${plural(launchBound, 'timing')} of less work than a launch takes: where no record has the time of an empty kernel on this device, there is no floor to hold them against`,
        )
      : null,
    floorBars(shown),
  );
}

function performanceView() {
  if (!DATA.timings.length)
    return [
      el(
        'p',
        {},
        'These records hold no device time. ',
        el('code', {}, 'nox -s bench'),
        ' on a machine with a GPU makes them.',
      ),
    ];
  const known = devices();
  const names = [...new Set([...cells.values()].flatMap((cell) => [...cell.cold, ...cell.hot]).map(deviceOf))];
  const pick = (part, at) =>
    partValues(at).length > 1
      ? choice(part, [[null, 'all'], ...partValues(at).map((value) => [value, value])], state[part], (value) =>
          set({ [part]: value }),
        )
      : null;
  const asked = controls(
    'Which times',
    choice(
      'L2',
      [
        ['cold', 'cold'],
        ['hot', 'hot'],
      ],
      state.temperature,
      (value) => set({ temperature: value }),
    ),
    choice('order', SORTS, state.sort, (value) => set({ sort: value })),
    SUBJECT_PARTS.map(pick),
  );
  fitPlot();
  return [
    asked,
    names.flatMap((name) => Object.keys(DATA.ops).map((op) => performanceOp(op, name, known.get(name)))),
  ];
}
