//! `mizzen-import`, which `mizzen import` and its like start.

fn main() {}
