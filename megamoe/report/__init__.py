"""Record files shown to a person: one HTML page that needs no network, or tables in a terminal; no policy.

  material = gather(record_files())
  page(material, Extras(...)) -> str

`material` reads the files, `measures` lists what a cell can show and its colour limits, `layout` places the cells,
`encoding` writes the page's data, `page` writes the page. Style and script are in `assets`, as package data.

assets/plots.js says why the plots are our own.
"""
