"""What record files say, for a person: one HTML page without a network, or a few tables in a terminal.

material = gather(record_files())
page(material, Extras(...)) -> str

`material` reads, `measures` says what a cell may show, `layout` where it stands, `encoding` makes the page's data and
`page` the page. The look and the behaviour are in `assets`, which are package data.
"""
