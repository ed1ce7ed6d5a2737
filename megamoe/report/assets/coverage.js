'use strict';
// What the VM implements of the PTX ISA, family by family, and who witnesses it.

function families() {
  const found = new Map();
  for (const [family, form, place, witness, ...kernels] of DATA.coverage) push(found, family, { form, place, witness, kernels });
  return found;
}

function formTable(family, forms) {
  return table(family, ['form*', 'PTX ISA', 'witness', 'second kernel'], forms.map((one) => [el('code', {}, one.form), one.place, one.witness, one.kernels.join(', ')]));
}

function familyRow(family, forms) {
  const kept = forms.filter((one) => state.filter.every((word) => `${family} ${one.form} ${one.witness} ${one.kernels.join(' ')}`.toLowerCase().includes(word)));
  if (!kept.length) return null;
  const hardware = kept.filter((one) => one.witness === 'hardware').length;
  const second = kept.filter((one) => one.kernels.length).length;
  const bar = el('span', { class: 'hardware' });
  bar.style.width = `${(hardware / kept.length) * 100}%`;
  return el('tr', {}, el('td', {}, el('details', { open: state.filter.length > 0 }, el('summary', {}, family), formTable(family, kept))),
    el('td', { class: 'number' }, plain(kept.length)), el('td', { class: 'number' }, plain(hardware)), el('td', { class: 'number' }, plain(second)),
    el('td', {}, el('div', { class: 'track' }, bar)));
}

function foreignTable() {
  const rows = DATA.foreign.filter((one) => state.filter.every((word) => Object.values(one).join(' ').toLowerCase().includes(word)))
    .map((one) => [one.package, one.target, one.kernel, `${one.options} ${one.shape}`, one.status, one.error === null ? '' : plain(one.error), one.reason]);
  return table('Kernels by others', ['package', 'target', 'kernel', 'options and shape', 'status', 'error#', 'reason'], rows);
}

function coverageView() {
  if (!DATA.coverage.length) return [el('p', {}, 'results/coverage.md is not beside these records. ', el('code', {}, 'python -m backends.vm.coverage'), ' writes it.')];
  const count = (test) => DATA.coverage.filter(test).length;
  const columns = ['family', 'forms', 'hardware', 'second kernel', 'share that hardware witnesses'];
  const head = columns.map((name, at) => el('th', { scope: 'col', class: at > 0 && at < 4 ? 'number' : null }, name));
  return [
    el('h2', {}, 'What the PTX virtual machine implements'),
    el('p', { class: 'muted' }, `${plural(DATA.coverage.length, 'form')} in ${plural(families().size, 'family').replace('familys', 'families')}: ${count((one) => one[3] === 'hardware')} witnessed by hardware (the same instruction ran on a GPU and its results are test data), the others by the ISA's text; ${count((one) => one.length > 4)} also ran in kernels that none of us wrote.`),
    el('table', { class: 'list', 'aria-label': 'Coverage' }, el('thead', {}, el('tr', {}, head)), el('tbody', {}, [...families()].map(([family, forms]) => familyRow(family, forms)).filter(Boolean))),
    DATA.foreign.length ? el('section', { class: 'block' }, el('h3', {}, 'Kernels by others in the VM'), foreignTable()) : null,
  ];
}
