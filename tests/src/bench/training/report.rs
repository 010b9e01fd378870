//! What docs/performance.md says of the trainings: a table and pictures, made of the raw numbers alone.

use std::fmt::Write;

use anyhow::Result;

use super::plot::{self, Line};
use super::samples::{Interval, Quantity, Row, RowKey, Samples};
use crate::bench::document;

const BEGIN: &str = "<!-- made by `make bench-training`, of performance/training.csv -->\n";
const END: &str = "<!-- end of what `make bench-training` makes -->\n";

/// Puts the section in place of the page's old one.
pub fn replace_section(page: &str, section: &str) -> Result<String> {
    document::replace_section(page, BEGIN, END, section)
}

/// The section of the page.
pub fn section(samples: &Samples) -> String {
    let rows = samples.rows();
    if rows.is_empty() {
        return "\nNot measured yet: `make bench-training`, on a machine that does nothing else.\n\n"
            .to_owned();
    }
    let mut text = format!(
        "\n{}; {}; processes of others that wanted a core between the steps, at most: {}; `{}`.\n\n![Training](performance/training.svg)\n\n",
        samples.fact("date"),
        samples.fact("machine"),
        samples.fact("processes of others, at most"),
        samples.fact("command")
    );
    let of = |wanted: Quantity| rows.iter().filter(move |(key, _)| key.quantity == wanted);
    table(&mut text, "images/s", of(Quantity::ImagesPerSecond));
    text.push_str(
        "\nThe whole step, from srun's start to its end, in which the program reads most of its files:\n\n",
    );
    table(&mut text, "s", of(Quantity::StepSeconds));
    text.push_str("\n![Messages](performance/messages.svg)\n\n");
    table(&mut text, "us, 8 bytes one way", of(Quantity::LatencyMicroseconds));
    text.push('\n');
    table(&mut text, "MiB/s, 4 MiB there and back", of(Quantity::MebibytesPerSecond));
    text.push('\n');
    text
}

fn table<'a>(text: &mut String, unit: &str, rows: impl Iterator<Item = (&'a RowKey, &'a Row)>) {
    let _ = writeln!(
        text,
        "| {unit} | pairs | on the node | in the container | difference, 95 % interval | within the goal |\n\
         |---|---|---|---|---|---|"
    );
    for (key, row) in rows {
        let interval = Interval::of(&row.differences());
        let (node, container) = row.medians();
        let verdict = match key.quantity.goal() {
            Some(goal) => format!("{} ({goal} %)", interval.verdict(goal)),
            None => String::new(),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {node:.1} | {container:.1} | {:+.2} % ± {:.2} | {verdict} |",
            label(key),
            row.pairs.len(),
            interval.mean,
            interval.margin
        );
    }
}

/// The pictures, by file name; none if nothing is measured.
pub fn pictures(samples: &Samples) -> Vec<(&'static str, String)> {
    let rows = samples.rows();
    if rows.is_empty() {
        return Vec::new();
    }
    let lines = |wanted: &[Quantity], with_unit: bool| -> Vec<Line> {
        rows.iter()
            .filter(|(key, _)| wanted.contains(&key.quantity))
            .map(|(key, row)| {
                let unit = if with_unit { format!(", {}", key.quantity.unit()) } else { String::new() };
                Line { label: format!("{}{unit}", label(key)), differences: row.differences() }
            })
            .collect()
    };
    let messages = [Quantity::LatencyMicroseconds, Quantity::MebibytesPerSecond];
    vec![
        (
            "training.svg",
            plot::differences(
                "Images per second of a training",
                "more is faster",
                1.0,
                &lines(&[Quantity::ImagesPerSecond], false),
            ),
        ),
        (
            "messages.svg",
            plot::differences(
                "Messages between two ranks: latency (us) and bandwidth (MiB/s)",
                "less us and more MiB/s is faster",
                2.0,
                &lines(&messages, true),
            ),
        ),
    ]
}

fn label(key: &RowKey) -> String {
    let plural = |count: u32, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    format!("{}, {}, {}", key.subject, plural(key.nodes, "node"), plural(key.ranks, "rank"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Whoever edits the table by hand, or renews the numbers without it, hears of it here.
    #[test]
    fn the_documents_show_the_raw_numbers() {
        let read = |file: &str| fs::read_to_string(document::documents().join(file)).unwrap();
        let samples = Samples::parse(&read("performance/training.csv")).unwrap();
        let page = read("performance.md");
        let renew = "run `vcluster bench training-report`";
        assert_eq!(replace_section(&page, &section(&samples)).unwrap(), page, "{renew}");
        for (name, picture) in pictures(&samples) {
            assert_eq!(read(&format!("performance/{name}")), picture, "{renew}");
        }
    }
}
