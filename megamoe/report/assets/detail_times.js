'use strict';
// The sections of the drawer about time: device times with their samples, and the history of the row over the runs.

function timesSection(cell) {
  const found = ['cold', 'hot'].map((name) => last(cell[name])).filter(Boolean);
  if (!found.length) return null;
  const timed = found.filter((timing) => timing.median);
  const failed = found.filter((timing) => !timing.median);
  return section(
    'device time',
    timed.length ? [timesTable(timed), strip(timed)] : null,
    failed.map((timing) =>
      el('p', { class: 'sentence' }, `${timing.temperature}: ${timing.status}. ${timing.sentence}`),
    ),
    rivals(cell, timed),
  );
}

function timesTable(timings) {
  const columns = [
    '',
    'median µs#',
    '95% interval#',
    'floor µs#',
    'floor / time#',
    'samples#',
    'launches each#',
    'discarded',
    'ended by',
  ];
  const rows = timings.map((timing) => [
    timing.temperature,
    micro(timing.median),
    `${micro(timing.low)} – ${micro(timing.high)}`,
    timing.floor === null ? '–' : `${micro(timing.floor)} (${timing.by})`,
    brief(timingNumber(timing) ?? 'NaN'),
    plain(timing.count),
    plain(timing.launches),
    Object.entries(timing.discarded)
      .map(([why, count]) => `${count} ${why}`)
      .join(', ') || 'none',
    timing.stopped ?? '–',
  ]);
  return table('device times', columns, rows);
}

// Times of the same case by other backends on the same executor.
function rivals(cell, timings) {
  const executor = DATA.subjects[cell.subject][2];
  const temperature = timings[0]?.temperature;
  const others = [...cells.values()].filter(
    (one) =>
      one.caseIndex === cell.caseIndex &&
      DATA.subjects[one.subject][2] === executor &&
      last(one[temperature] ?? [])?.median,
  );
  if (others.length < 2) return null;
  const rows = others
    .map((one) => [one, last(one[temperature])])
    .sort(([, one], [, other]) => one.median - other.median);
  const best = rows[0][1].median;
  return table(
    `the same case, ${temperature}`,
    [`same case, ${temperature}`, 'median µs#', 'of the fastest#', 'floor / time#'],
    rows.map(([one, timing]) => [
      one === cell ? el('b', {}, subjectName(one.subject)) : subjectName(one.subject),
      micro(timing.median),
      `${(timing.median / best).toFixed(2)}×`,
      brief(timingNumber(timing) ?? 'NaN'),
    ]),
  );
}

function runLabel(run) {
  const header = DATA.runs[runOrder.get(DATA.run_ids[run])];
  return header ? header.started.slice(0, 16).replace('T', ' ') : DATA.run_ids[run];
}

function runs(lines) {
  return [...new Map(lines.map((line) => [line.run, line])).values()];
}

// For each number with a history: its name, style, and value in each run.
function historySeries(cell, record) {
  const records = record ? runs(cell.schedules.get(record.schedule)) : [];
  const found = [];
  const add = (name, style, lines, value) => {
    const values = lines.map(value).filter((one) => one !== null && one !== undefined);
    if (values.length) found.push({ name, style, values, lines });
  };
  for (const measure of DATA.measures.filter((one) => ['metrics', 'counters'].includes(one.source))) {
    add(measure.title, measure.style, records, (one) => recordNumber(one, measure));
  }
  add('warp instructions', 'whole', records, (one) =>
    named('counters', one.counters)
      .filter(([name]) => name.startsWith('instructions_'))
      .reduce((sum, [, value]) => (sum ?? 0) + value, null),
  );
  for (const name of ['cold', 'hot']) add(`${name} median, µs`, 'number', runs(cell[name]), (one) => one.median);
  return found;
}

function historySection(cell, record) {
  const records = record ? cell.schedules.get(record.schedule) : [];
  const series = historySeries(cell, record);
  const signs = records.map((one) =>
    el(
      'span',
      {
        class: `swatch ${one.status}`,
        title: `${runLabel(one.run)} ${one.status}`,
        role: 'img',
        'aria-label': `${runLabel(one.run)} ${one.status}`,
      },
      DATA.signs[one.status],
    ),
  );
  const told = (value, style) => (style === 'whole' ? plain(value) : brief(value, style));
  const rows = series.map(({ name, style, values }) => [
    name,
    new Set(values).size > 1 ? sparkline(values, `${name} over ${values.length} runs`) : '',
    told(values[0], style),
    told(last(values), style),
    values.every((value) => value === values[0]) ? (values.length > 1 ? 'unchanged' : 'one run') : change(values),
  ]);
  if (!rows.length && !records.length) return null;
  const title = `history${record ? ` under ${DATA.schedules[record.schedule]}` : ''}`;
  return section(
    title,
    records.length ? el('p', { class: 'chips', 'aria-label': 'Verdicts, the oldest first' }, signs) : null,
    rows.length ? table(title, ['', '', 'oldest#', 'newest#', ''], rows) : null,
  );
}

function change(values) {
  const [first, final] = [toNumber(values[0]), toNumber(last(values))];
  if (!first || !Number.isFinite(final / first)) return '';
  const percent = Math.abs(final / first - 1) * 100;
  return `${final >= first ? '+' : '−'}${percent < 10 ? percent.toPrecision(2) : percent.toFixed(0)}%`;
}
