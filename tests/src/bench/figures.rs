//! The figures of `make bench`: what each row compares, docs/performance/bench.csv, which keeps what was measured last of each,
//! and the table of docs/performance.md, which is made of that file alone.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::document::{documents, load_of_others, machine, replace_section, today};
use super::{Times, median};
use crate::{run_tool, target_dir};

const BEGIN: &str = "<!-- made by `make bench`, of performance/bench.csv -->\n";
const END: &str = "<!-- end of what `make bench` makes -->\n";

const HEADER: [&str; 14] = [
    "part",
    "row",
    "unit",
    "value",
    "beside",
    "result",
    "goal",
    "verdict",
    "rounds",
    "date",
    "version",
    "machine",
    "processes of others",
    "remark",
];

/// What one command of `vcluster bench` measures.
pub struct Part {
    /// As the file has it.
    pub name: &'static str,
    /// As the page has it.
    pub title: &'static str,
    /// All that it can print.
    pub rows: Vec<Row>,
}

/// One figure that is kept.
pub struct Row {
    name: String,
    unit: &'static str,
    measure: Measure,
    /// What the result should be at most.
    goal: Option<f64>,
}

/// How a figure is made of the medians of what was timed.
#[derive(Clone, Copy)]
pub enum Measure {
    /// One as a multiple of another.
    Ratio(&'static str, &'static str),
    /// What one adds to a third, as a multiple of what the other adds to it.
    AddedRatio(&'static str, &'static str, &'static str),
    /// One less another.
    Difference(&'static str, &'static str),
    /// One by itself.
    Amount(&'static str),
}

impl Row {
    /// A row without a goal, of times in milliseconds.
    pub fn new(name: impl Into<String>, measure: Measure) -> Row {
        Row { name: name.into(), unit: "ms", measure, goal: None }
    }

    /// What it should be at most.
    pub fn goal(self, goal: f64) -> Row {
        Row { goal: Some(goal), ..self }
    }

    /// What it is measured in, if not in milliseconds.
    pub fn unit(self, unit: &'static str) -> Row {
        Row { unit, ..self }
    }

    fn is_ratio(&self) -> bool {
        matches!(self.measure, Measure::Ratio(..) | Measure::AddedRatio(..))
    }

    fn goal_text(&self) -> String {
        match self.goal {
            Some(goal) if self.is_ratio() => goal.to_string(),
            Some(goal) => format!("{goal} {}", self.unit),
            None => String::new(),
        }
    }

    fn verdict(&self, result: f64) -> &'static str {
        match self.goal {
            Some(goal) if result <= goal => "met",
            Some(_) => "missed",
            None => "",
        }
    }

    /// The result, and what it was made of.
    fn result_text(&self, numbers: &Numbers) -> String {
        let result = match self.is_ratio() {
            true => format!("{:.2}", numbers.result),
            false => amount(numbers.result, self.unit),
        };
        match (numbers.value, numbers.beside) {
            (Some(value), Some(beside)) => {
                format!("{result} ({}, {})", amount(value, self.unit), amount(beside, self.unit))
            }
            _ => result,
        }
    }
}

/// For people.
fn amount(value: f64, unit: &str) -> String {
    let (value, unit) = if unit == "ms" && value >= 10_000.0 { (value / 1000.0, "s") } else { (value, unit) };
    match value.abs() {
        small if small < 1.0 => format!("{value:.2} {unit}"),
        middle if middle < 100.0 => format!("{value:.1} {unit}"),
        _ => format!("{value:.0} {unit}"),
    }
}

/// What was measured of a row.
#[derive(Clone, Debug, PartialEq)]
struct Numbers {
    value: Option<f64>,
    beside: Option<f64>,
    result: f64,
    rounds: Option<usize>,
}

impl Numbers {
    /// None where something was not measured.
    fn of(measure: Measure, times: &Times) -> Option<Numbers> {
        let median = |name| median(times, name);
        let (one, value, beside, result) = match measure {
            Measure::Ratio(one, other) => {
                (one, median(one), Some(median(other)), median(one) / median(other))
            }
            Measure::AddedRatio(one, other, base) => {
                let added = |name| median(name) - median(base);
                (one, added(one), Some(added(other)), added(one) / added(other))
            }
            Measure::Difference(one, other) => {
                (one, median(one), Some(median(other)), median(one) - median(other))
            }
            Measure::Amount(one) => (one, median(one), None, median(one)),
        };
        let rounds = times.get(one).map(Vec::len);
        // As exact as the file has it, so that what is said of a goal stays so.
        let result = (result * 1000.0).round() / 1000.0;
        result.is_finite().then_some(Numbers { value: Some(value), beside, result, rounds })
    }
}

/// When, of what and where it was measured. What is known of one run is the same for all its rows.
#[derive(Clone, Debug, PartialEq)]
struct Facts {
    date: String,
    version: String,
    machine: String,
    load: String,
    remark: String,
}

impl Facts {
    fn text(&self) -> String {
        let Facts { date, version, machine, load, remark } = self;
        let load = match load.as_str() {
            "" => String::new(),
            load => format!("processes of others that wanted a core before and after, at most: {load}"),
        };
        let facts = [date.as_str(), version, machine, &load, remark];
        facts.into_iter().filter(|fact| !fact.is_empty()).collect::<Vec<_>>().join("; ")
    }
}

/// One run of one part.
pub struct Run {
    part: &'static str,
    load: f64,
    measured: Vec<(String, Numbers)>,
}

impl Run {
    /// Before anything is measured: others that use the machine now are noted.
    pub fn begin(part: &Part) -> Result<Run> {
        Ok(Run { part: part.name, load: load_of_others()?, measured: Vec::new() })
    }

    /// Prints a row, and keeps it.
    pub fn record(&mut self, row: &Row, times: &Times) {
        let Some(numbers) = Numbers::of(row.measure, times) else {
            return println!("  {}: not measured", row.name);
        };
        let goal = match row.goal_text() {
            goal if goal.is_empty() => goal,
            goal => format!(" [goal {goal}: {}]", row.verdict(numbers.result)),
        };
        println!("  {}: {}{goal}", row.name, row.result_text(&numbers));
        self.measured.push((row.name.clone(), numbers));
    }

    /// Puts its rows in place of the same rows of earlier runs, and renews the page.
    pub fn save(self) -> Result<()> {
        let mizzen = target_dir().join("stage/usr/bin/mizzen");
        let facts = Facts {
            date: today()?,
            version: run_tool(Command::new(mizzen).arg("--version"))?.trim().to_owned(),
            machine: machine()?,
            load: format!("{:.1}", self.load.max(load_of_others()?)),
            remark: String::new(),
        };
        let mut figures = Figures::read()?;
        for (row, numbers) in self.measured {
            figures.0.insert((self.part.to_owned(), row), (numbers, facts.clone()));
        }
        let file = documents().join("performance/bench.csv");
        fs::write(&file, figures.to_text(&super::parts()))?;
        figures.render()
    }
}

/// Writes the page's table anew, of the figures that are there.
pub fn run_report() -> Result<()> {
    Figures::read()?.render()
}

/// The last figures of each row, by part and name.
#[derive(Debug)]
struct Figures(BTreeMap<(String, String), (Numbers, Facts)>);

impl Figures {
    fn read() -> Result<Figures> {
        Figures::parse(&fs::read_to_string(documents().join("performance/bench.csv"))?)
    }

    fn parse(text: &str) -> Result<Figures> {
        let (header, lines) = text.split_once('\n').unwrap_or_default();
        if header != csv_line(HEADER) {
            bail!("not a file of figures: {header}");
        }
        let lines =
            lines.lines().map(|line| parse_line(line).with_context(|| format!("not a figure: {line}")));
        Ok(Figures(lines.collect::<Result<_>>()?))
    }

    /// As CSV, in the order of the page. What no bench prints any more is left out.
    fn to_text(&self, parts: &[Part]) -> String {
        let mut text = csv_line(HEADER) + "\n";
        let number = |number: &Option<f64>| number.map_or_else(String::new, |number| format!("{number:.3}"));
        for (part, row) in parts.iter().flat_map(|part| part.rows.iter().map(move |row| (part.name, row))) {
            let Some((numbers, facts)) = self.get(part, row) else { continue };
            let Numbers { value, beside, result, rounds } = numbers;
            let Facts { date, version, machine, load, remark } = facts;
            let goal = row.goal.map_or_else(String::new, |goal| goal.to_string());
            let rounds = rounds.map_or_else(String::new, |rounds| rounds.to_string());
            let (name, unit, verdict) = (&row.name, row.unit, row.verdict(*result));
            let (value, beside, result) = (number(value), number(beside), format!("{result:.3}"));
            text += &csv_line([
                part, name, unit, &value, &beside, &result, &goal, verdict, &rounds, date, version, machine,
                load, remark,
            ]);
            text.push('\n');
        }
        text
    }

    fn get(&self, part: &str, row: &Row) -> Option<&(Numbers, Facts)> {
        self.0.get(&(part.to_owned(), row.name.clone()))
    }

    /// The section of the page: all rows that there are, and the runs that they are of.
    fn section(&self, parts: &[Part]) -> String {
        let mut text = "\n| | goal | measured | | run |\n|---|---|---|---|---|\n".to_owned();
        let mut runs: Vec<&Facts> = Vec::new();
        for part in parts {
            let _ = writeln!(text, "| **{}** | | | | |", part.title);
            for row in &part.rows {
                let (name, goal) = (&row.name, row.goal_text());
                let Some((numbers, facts)) = self.get(part.name, row) else {
                    let _ = writeln!(text, "| {name} | {goal} | not measured | | |");
                    continue;
                };
                let run = runs.iter().position(|run| *run == facts).unwrap_or_else(|| {
                    runs.push(facts);
                    runs.len() - 1
                });
                let (result, verdict) = (row.result_text(numbers), row.verdict(numbers.result));
                let _ = writeln!(text, "| {name} | {goal} | {result} | {verdict} | {} |", run + 1);
            }
        }
        text.push_str("\nThe runs:\n\n");
        for (number, run) in runs.iter().enumerate() {
            let _ = writeln!(text, "{}. {}", number + 1, run.text());
        }
        text.push('\n');
        text
    }

    fn render(&self) -> Result<()> {
        let page = documents().join("performance.md");
        let section = self.section(&super::parts());
        fs::write(&page, replace_section(&fs::read_to_string(&page)?, BEGIN, END, &section)?)?;
        println!("\n{} shows performance/bench.csv", page.display());
        Ok(())
    }
}

/// Every field in quotes: names have commas.
fn csv_line(fields: [&str; HEADER.len()]) -> String {
    format!("\"{}\"", fields.join("\",\""))
}

type Line = ((String, String), (Numbers, Facts));

fn parse_line(line: &str) -> Result<Line> {
    // Unit, goal and verdict are those of the row.
    let [part, row, _, value, beside, result, _, _, rounds, date, version, machine, load, remark] = line
        .strip_prefix('"')
        .and_then(|line| line.strip_suffix('"'))
        .unwrap_or(line)
        .split("\",\"")
        .collect::<Vec<_>>()[..]
    else {
        bail!("it has not {} fields", HEADER.len());
    };
    let optional = |text: &str| if text.is_empty() { Ok(None) } else { text.parse().map(Some) };
    let numbers = Numbers {
        value: optional(value)?,
        beside: optional(beside)?,
        result: result.parse()?,
        rounds: if rounds.is_empty() { None } else { Some(rounds.parse()?) },
    };
    let [date, version, machine, load, remark] = [date, version, machine, load, remark].map(str::to_owned);
    Ok(((part.to_owned(), row.to_owned()), (numbers, Facts { date, version, machine, load, remark })))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::parts;

    /// Whoever edits the table by hand, adds a row, or renews the numbers without the page, hears of it here.
    #[test]
    fn the_documents_show_the_raw_numbers() {
        let read = |file: &str| fs::read_to_string(documents().join(file)).unwrap();
        let (page, raw) = (read("performance.md"), read("performance/bench.csv"));
        let figures = Figures::parse(&raw).unwrap();
        let renew = "run `vcluster bench report`";
        assert_eq!(replace_section(&page, BEGIN, END, &figures.section(&parts())).unwrap(), page, "{renew}");
        // No row is there that no bench prints, and every verdict is that of its goal.
        assert_eq!(figures.to_text(&parts()), raw);
    }

    #[test]
    fn every_row_has_a_name_of_its_own() {
        let mut names = std::collections::BTreeSet::new();
        for part in parts() {
            assert!(!part.rows.is_empty(), "{}", part.name);
            for row in part.rows {
                assert!(!row.name.contains(['"', '|']), "{}", row.name);
                assert!(
                    names.insert((part.name, row.name.clone())),
                    "{}: {} is there twice",
                    part.name,
                    row.name
                );
            }
        }
    }

    fn part() -> Part {
        let rows = vec![
            Row::new("a, by b", Measure::Ratio("a", "b")).goal(0.5),
            Row::new("added", Measure::AddedRatio("a", "b", "base")),
            Row::new("plugin", Measure::Difference("a", "b")).goal(1.0),
            Row::new("memory", Measure::Amount("m")).unit("MiB").goal(64.0),
            Row::new("missing", Measure::Ratio("a", "nothing")).goal(2.0),
        ];
        Part { name: "part", title: "A part", rows }
    }

    #[test]
    fn a_row_says_what_was_measured() {
        let of = |name: &str, numbers: &[f64]| (name.to_owned(), numbers.to_vec());
        let times: Times =
            [of("a", &[4.0, 3.0, 5.0]), of("b", &[10.0]), of("base", &[2.0]), of("m", &[70.0])].into();
        let mut run = Run { part: "part", load: 0.0, measured: Vec::new() };
        let part = part();
        part.rows.iter().for_each(|row| run.record(row, &times));
        let facts = |remark: &str| Facts {
            date: "today".to_owned(),
            version: "1.0".to_owned(),
            machine: "2 cores".to_owned(),
            load: if remark.is_empty() { "0.3".to_owned() } else { String::new() },
            remark: remark.to_owned(),
        };
        let mut figures = Figures(BTreeMap::new());
        for (name, numbers) in run.measured {
            let facts = facts(if name == "memory" { "by hand" } else { "" });
            figures.0.insert(("part".to_owned(), name), (numbers, facts));
        }
        let parts = [part];
        let text = figures.to_text(&parts);
        let lines: Vec<String> = text.lines().skip(1).map(|line| line.replace('"', "")).collect();
        let expected = [
            "part,a, by b,ms,4.000,10.000,0.400,0.5,met,3,today,1.0,2 cores,0.3,",
            "part,added,ms,2.000,8.000,0.250,,,3,today,1.0,2 cores,0.3,",
            "part,plugin,ms,4.000,10.000,-6.000,1,met,3,today,1.0,2 cores,0.3,",
            "part,memory,MiB,70.000,,70.000,64,missed,1,today,1.0,2 cores,,by hand",
        ];
        assert_eq!(lines, expected);
        assert_eq!(Figures::parse(&text).unwrap().0, figures.0);
        let section = "\n| | goal | measured | | run |\n|---|---|---|---|---|\n| **A part** | | | | |\n\
            | a, by b | 0.5 | 0.40 (4.0 ms, 10.0 ms) | met | 1 |\n\
            | added |  | 0.25 (2.0 ms, 8.0 ms) |  | 1 |\n\
            | plugin | 1 ms | -6.0 ms (4.0 ms, 10.0 ms) | met | 1 |\n\
            | memory | 64 MiB | 70.0 MiB | missed | 2 |\n\
            | missing | 2 | not measured | | |\n\nThe runs:\n\n\
            1. today; 1.0; 2 cores; processes of others that wanted a core before and after, at most: 0.3\n\
            2. today; 1.0; 2 cores; by hand\n\n";
        assert_eq!(figures.section(&parts), section);
    }

    #[test]
    fn what_is_no_figure_is_named() {
        let error = |text: &str| format!("{:#}", Figures::parse(text).unwrap_err());
        assert_eq!(error("x\n"), "not a file of figures: x");
        let text = csv_line(HEADER) + "\n\"a\",\"b\"\n";
        assert_eq!(error(&text), "not a figure: \"a\",\"b\": it has not 14 fields");
    }
}
