'use strict';
// Small plots: scales with round ticks, strips of samples, sparklines, intervals, error maps, markers.
//
// Our own, not a library's. The page must embed its library and this tree holds nothing fetched, so the library would
// have to be a Python package that is read at render time. Those with a script are too large: bokeh.min.js has 1.3 MB,
// plotly.min.js 4.8 MB; the whole page with all tracked records has 1 MB. The d3 on PyPI is version 3, of 2016. The
// plots need little: two scales, and marks that open their row, take their colours from report.css and add no style
// element, because the content security policy forbids it.

// About `count` round values between low and high.
function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1)
    found.push(Number((at * step).toPrecision(12)));
  return found;
}

// Powers of ten, with their twos and fives if there are few.
function logTicks(low, high) {
  const found = [];
  const factors = Math.log10(high / low) > 3 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}

function linearScale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

function logScale(low, high, from, to) {
  const linear = linearScale(Math.log10(low), Math.log10(high), from, to);
  return (value) => linear(Math.log10(value));
}

const STRIP = { width: 640, left: 40, right: 12, height: 56, below: 24 };

// A dot per sample: x is its time, y its order, so drift shows as a slope.
function strip(timings) {
  const { width, right, height, below } = STRIP;
  const bottom = timings.length * (height + below) + 4;
  const meaning = 'µs a launch; dots in the order taken, downwards; line: median, band: its 95% interval';
  return picture(
    width,
    bottom + 16,
    `Samples: ${timings.map((timing) => timing.temperature).join(' and ')}`,
    timings.map((timing, at) => oneStrip(timing, 4 + at * (height + below))),
    svg('text', { x: width - right, y: bottom + 12, 'text-anchor': 'end' }, meaning),
  );
}

// From the smallest sample, or the floor if that is near, to where nearly all samples end. Outliers are at the edge.
function stripRange(samples, timing) {
  const ordered = samples.toSorted((one, other) => one - other);
  const usual = ordered[Math.floor(ordered.length * 0.95)];
  const near = timing.floor !== null && timing.floor > ordered[0] * 0.97;
  const low = near ? Math.min(timing.floor, ordered[0]) : ordered[0];
  const high = Math.min(last(ordered), usual + 3 * (usual - ordered[0]) + ordered[0] * 1e-3);
  const margin = (high - low || high * 0.01) * 0.03;
  return [low - margin, high + margin];
}

function oneStrip(timing, top) {
  const { width, left, right, height } = STRIP;
  const samples = samplesOf(timing);
  const [low, high] = stripRange(samples, timing);
  const x = linearScale(low, high, left, width - right);
  const y = (at) => top + 3 + (at / Math.max(1, samples.length - 1)) * (height - 6);
  const upright = (look, value, reach = 0) =>
    svg('line', { class: look, x1: x(value), x2: x(value), y1: top, y2: top + height + reach });
  const dots = samples.map((value, at) => {
    const place = { cx: x(Math.min(value, high)).toFixed(1), cy: y(at).toFixed(1), r: value > high ? 3 : 1.7 };
    return svg('circle', { class: 'dot', ...place }, value > high ? svg('title', {}, `${micro(value)} µs`) : null);
  });
  const band = { x: x(timing.low), y: top, width: Math.max(1, x(timing.high) - x(timing.low)), height };
  const label = { x: width - right, y: top + height + 13, 'text-anchor': 'end' };
  const strays = samples.filter((value) => value > high);
  return svg(
    'g',
    {},
    svg('text', { x: 0, y: top + height / 2 + 4 }, timing.temperature),
    ticks(low, high, 6).map((value) => [
      upright('grid', value, 3),
      svg('text', { class: 'value', x: x(value), y: label.y, 'text-anchor': 'middle' }, plain(value, 5)),
    ]),
    svg('rect', { class: 'band', ...band }),
    dots,
    upright('median', timing.median),
    timing.floor !== null && timing.floor > low ? upright('floor', timing.floor) : null,
    strays.length
      ? svg('text', { class: 'stray', ...label }, `${strays.length} up to ${micro(Math.max(...strays))} ▸`)
      : null,
  );
}

function sparkline(values, name, width = 150) {
  const
    height = 20;
  const numbers = values.map(toNumber).filter(Number.isFinite);
  const y = linearScale(Math.min(...numbers), Math.max(...numbers), height - 3, 3);
  const x = linearScale(0, Math.max(1, values.length - 1), 3, width - 4);
  const points = values.map((value, at) => [x(at), y(toNumber(value))]).filter(([, place]) => Number.isFinite(place));
  const path = points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(' ');
  const end = last(points);
  return picture(
    width,
    height,
    name,
    svg('polyline', { class: 'spark', points: path }),
    end ? svg('circle', { class: 'spark-end', cx: end[0], cy: end[1], r: 2.5 }) : null,
  );
}

// A value against its bar. The tick is at four fifths of the width.
function barPlot(ratio) {
  const width = 120,
    tick = 96,
    number = toNumber(ratio);
  const length = Number.isFinite(number) ? Math.min(width, number * tick) : width;
  return picture(
    width,
    12,
    `${plain(ratio)} of the bar`,
    svg('rect', {
      class: number > 1 || Number.isNaN(number) ? 'bar-over' : 'bar-ok',
      x: 0,
      y: 3,
      width: Math.max(1, length),
      height: 6,
    }),
    svg('line', { class: 'axis', x1: tick, x2: tick, y1: 0, y2: 12 }),
  );
}

// The ratio of two times with its interval, on a logarithmic scale around 1. The band is the threshold.
function ratioPlot([, , ratio, low, high, threshold], span) {
  const width = 150,
    middle = 75,
    reach = Math.log(1 + span);
  const x = (value) => Math.max(2, Math.min(width - 2, middle + (Math.log(value) / reach) * (middle - 4)));
  const from = low > 0 ? low : 1e-6,
    to = typeof high === 'number' ? high : 1e6;
  return picture(
    width,
    14,
    `ratio ${plain(ratio)}, from ${plain(low)} to ${plain(high)}`,
    threshold
      ? svg('rect', {
          class: 'band',
          x: x(1 / (1 + threshold)),
          y: 0,
          width: x(1 + threshold) - x(1 / (1 + threshold)),
          height: 14,
        })
      : null,
    svg('line', { class: 'axis', x1: middle, x2: middle, y1: 0, y2: 14 }),
    svg('line', { class: 'range', x1: x(from), x2: x(to), y1: 7, y2: 7 }),
    svg('circle', { class: 'spark-end', cx: x(ratio), cy: 7, r: 3 }),
  );
}

const SHADES = ' .:-=+*#%@';

// Colours a bundle's text picture (NAME.error.txt): one square per letter, stronger for a larger error, dark for a
// value that is not finite.
function errorMap(text) {
  const [title, ...lines] = text.trimEnd().split('\n');
  const rows = lines.filter((line) => line.startsWith('|')).map((line) => line.slice(1, -1));
  const side = 9,
    paths = new Map();
  rows.forEach((row, y) =>
    [...row].forEach((letter, x) => {
      const shade = SHADES.indexOf(letter);
      const look = shade < 0 ? 'shade-odd' : `shade${Math.round((shade / 9) * 6)}`;
      push(paths, look, `M${x * side} ${y * side}h${side - 1}v${side - 1}h${1 - side}z`);
    }),
  );
  const width = Math.max(1, ...rows.map((row) => row.length)) * side;
  return el(
    'figure',
    {},
    el('figcaption', { class: 'muted' }, title),
    picture(
      width,
      Math.max(1, rows.length) * side,
      title,
      [...paths].map(([look, path]) => svg('path', { class: look, d: path.join('') })),
    ),
  );
}

// Series differ in marker as well as colour. The second eight markers are the outlines of the first.
const MARKERS = [
  (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  (r) => `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (r) => `M0 ${-1.3 * r}L${1.3 * r} ${r}H${-1.3 * r}z`,
  (r) => `M0 ${-1.4 * r}L${1.4 * r} 0L0 ${1.4 * r}L${-1.4 * r} 0z`,
  (r) => `M0 ${1.3 * r}L${1.3 * r} ${-r}H${-1.3 * r}z`,
  (r) =>
    `M${-0.4 * r} ${-1.3 * r}h${0.8 * r}v${0.9 * r}h${0.9 * r}v${0.8 * r}h${-0.9 * r}v${0.9 * r}h${-0.8 * r}v${-0.9 * r}h${-0.9 * r}v${-0.8 * r}h${0.9 * r}z`,
  (r) => `M${-1.3 * r} 0L${r} ${-1.2 * r}V${1.2 * r}z`,
  (r) => `M${1.3 * r} 0L${-r} ${-1.2 * r}V${1.2 * r}z`,
];

// The class that gives a series its colour.
function seriesLook(series) {
  return `series${(series + 3 * Math.floor(series / MARKERS.length)) % 8}`;
}

function isOutline(series) {
  return Math.floor(series / MARKERS.length) % 2 === 1;
}

function marker(series, x, y, size = 4.5, attributes = {}) {
  const shape = MARKERS[series % MARKERS.length];
  return svg('path', {
    class: `mark ${seriesLook(series)}${isOutline(series) ? ' outline' : ''}`,
    transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`,
    d: shape(size),
    ...attributes,
  });
}
