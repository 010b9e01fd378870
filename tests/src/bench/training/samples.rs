//! What was measured, as a file that people and spreadsheets read, and what can be said of it: how much the container differs
//! from the node, and how sure that is.

use std::collections::BTreeMap;
use std::fmt::Write;

use anyhow::{Context, Result, bail};

/// What a number is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// Images that all ranks of a training take in together, without its start.
    ImagesPerSecond,
    /// From srun's start to its end, with the start of the program, for which it reads most of its files.
    StepSeconds,
    /// Half of the way there and back of 8 bytes.
    LatencyMicroseconds,
    /// 4 MiB there and back.
    MebibytesPerSecond,
}

impl Quantity {
    const ALL: [Quantity; 4] = [
        Quantity::ImagesPerSecond,
        Quantity::StepSeconds,
        Quantity::LatencyMicroseconds,
        Quantity::MebibytesPerSecond,
    ];

    /// As it is written in files and tables.
    pub fn unit(self) -> &'static str {
        match self {
            Quantity::ImagesPerSecond => "images/s",
            Quantity::StepSeconds => "s",
            Quantity::LatencyMicroseconds => "us",
            Quantity::MebibytesPerSecond => "MiB/s",
        }
    }

    /// How far the container may be from the node, in percent; nothing is promised of a step's whole time.
    pub fn goal(self) -> Option<f64> {
        match self {
            Quantity::ImagesPerSecond => Some(1.0),
            Quantity::StepSeconds => None,
            Quantity::LatencyMicroseconds | Quantity::MebibytesPerSecond => Some(2.0),
        }
    }
}

/// One number of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The framework.
    pub subject: String,
    /// What the number is.
    pub quantity: Quantity,
    /// Nodes of the step.
    pub nodes: u32,
    /// Its ranks.
    pub ranks: u32,
    /// Counts from 1: the step on the node and the one in the container that ran after each other.
    pub pair: u32,
    /// In the container, or on the node.
    pub container: bool,
    /// The number.
    pub value: f64,
}

/// What the pairs of one row have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowKey {
    /// The quantity first: rows that are compared with each other are beside each other.
    pub quantity: Quantity,
    /// The framework.
    pub subject: String,
    /// Nodes of the step.
    pub nodes: u32,
    /// Its ranks.
    pub ranks: u32,
}

/// Pairs of the same kind.
#[derive(Debug, Default)]
pub struct Row {
    /// The number on the node and the one in the container.
    pub pairs: Vec<(f64, f64)>,
}

/// All numbers, and the facts of the run.
#[derive(Debug, Default)]
pub struct Samples {
    facts: Vec<String>,
    all: Vec<Sample>,
}

/// The fact that [`Samples::note_load`] keeps.
const LOAD: &str = "processes of others, at most";

const HEADER: &str = "subject,unit,nodes,ranks,pair,where,value";

impl Samples {
    /// None yet.
    pub fn new(facts: &[String]) -> Samples {
        Samples { facts: facts.to_vec(), all: Vec::new() }
    }

    /// Adds one.
    pub fn push(&mut self, sample: Sample) {
        self.all.push(sample);
    }

    /// Takes over what an earlier run has measured of other subjects, and how many others have used the machine then.
    pub fn keep_others(&mut self, earlier: Samples, subject: &str) {
        earlier.fact(LOAD).parse().into_iter().for_each(|load| self.note_load(load));
        self.all.extend(earlier.all.into_iter().filter(|sample| sample.subject != subject));
    }

    /// Keeps the most that others have used the machine so far: whoever reads the table should know.
    pub fn note_load(&mut self, load: f64) {
        let most = self.fact(LOAD).parse().map_or(load, |before: f64| before.max(load));
        self.facts.retain(|fact| !fact.starts_with(LOAD));
        self.facts.push(format!("{LOAD}: {most:.1}"));
    }

    /// What the run says of itself: `date`, `machine`, `command`, ….
    pub fn fact(&self, name: &str) -> &str {
        self.facts.iter().find_map(|fact| fact.strip_prefix(name)?.strip_prefix(": ")).unwrap_or("unknown")
    }

    /// As CSV, with the facts in front.
    pub fn to_text(&self) -> String {
        let mut text: String = self.facts.iter().map(|fact| format!("# {fact}\n")).collect();
        text.push_str(HEADER);
        text.push('\n');
        for Sample { subject, quantity, nodes, ranks, pair, container, value } in &self.all {
            let place = if *container { "container" } else { "node" };
            let unit = quantity.unit();
            let _ = writeln!(text, "{subject},{unit},{nodes},{ranks},{pair},{place},{value:.4}");
        }
        text
    }

    /// Reads that again.
    pub fn parse(text: &str) -> Result<Samples> {
        let mut samples = Samples::default();
        for line in text.lines().filter(|line| *line != HEADER) {
            match line.strip_prefix("# ") {
                Some(fact) => samples.facts.push(fact.to_owned()),
                None => samples.push(parse_line(line).with_context(|| format!("not a sample: {line}"))?),
            }
        }
        Ok(samples)
    }

    /// The complete pairs by row.
    pub fn rows(&self) -> BTreeMap<RowKey, Row> {
        let mut rows: BTreeMap<RowKey, Row> = BTreeMap::new();
        let mut nodes_values = BTreeMap::new();
        let mut containers_values = BTreeMap::new();
        for sample in &self.all {
            let Sample { subject, quantity, nodes, ranks, pair, container, value } = sample;
            let key = RowKey { quantity: *quantity, subject: subject.clone(), nodes: *nodes, ranks: *ranks };
            let values = if *container { &mut containers_values } else { &mut nodes_values };
            values.insert((key, *pair), *value);
        }
        for ((key, pair), on_node) in nodes_values {
            if let Some(inside) = containers_values.get(&(key.clone(), pair)) {
                rows.entry(key).or_default().pairs.push((on_node, *inside));
            }
        }
        rows
    }
}

fn parse_line(line: &str) -> Result<Sample> {
    let [subject, unit, nodes, ranks, pair, place, value] = line.split(',').collect::<Vec<_>>()[..] else {
        bail!("it has not seven fields");
    };
    Ok(Sample {
        subject: subject.to_owned(),
        quantity: Quantity::ALL.into_iter().find(|quantity| quantity.unit() == unit).context("unit")?,
        nodes: nodes.parse()?,
        ranks: ranks.parse()?,
        pair: pair.parse()?,
        container: match place {
            "node" => false,
            "container" => true,
            _ => bail!("neither on a node nor in a container"),
        },
        value: value.parse()?,
    })
}

/// A mean, and where it is with a probability of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// The mean.
    pub mean: f64,
    /// Half the interval's width; infinite if there is only one number.
    pub margin: f64,
}

impl Interval {
    /// By Student's t: the numbers are few.
    pub fn of(numbers: &[f64]) -> Interval {
        let count = numbers.len() as f64;
        let mean = numbers.iter().sum::<f64>() / count;
        let squares: f64 = numbers.iter().map(|number| (number - mean).powi(2)).sum();
        let margin = match numbers.len() {
            0 | 1 => f64::INFINITY,
            length => student_t(length - 1) * (squares / (count - 1.0) / count).sqrt(),
        };
        Interval { mean, margin }
    }

    /// What is said of a goal: it is met if the whole interval is within it.
    pub fn verdict(self, goal: f64) -> &'static str {
        let (low, high) = (self.mean - self.margin, self.mean + self.margin);
        if -goal <= low && high <= goal {
            "yes"
        } else if high < -goal || goal < low {
            "no"
        } else {
            "not shown"
        }
    }
}

impl Row {
    /// How much more the container has than the node, of each pair, in percent.
    pub fn differences(&self) -> Vec<f64> {
        self.pairs.iter().map(|(node, container)| 100.0 * (container / node - 1.0)).collect()
    }

    /// The median on the node and in the container.
    pub fn medians(&self) -> (f64, f64) {
        let middle = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            let half = values.len() / 2;
            match values.len() {
                0 => f64::NAN,
                length if length % 2 == 1 => values[half],
                _ => (values[half - 1] + values[half]) / 2.0,
            }
        };
        let (nodes, containers) = self.pairs.iter().copied().unzip();
        (middle(nodes), middle(containers))
    }
}

/// The 97.5 % quantile of Student's t; an approximation that is good to three digits beyond the table.
fn student_t(degrees: usize) -> f64 {
    const TABLE: [f64; 20] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
        2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    ];
    let approximation = 1.960 + 2.372 / degrees as f64 + 2.82 / (degrees as f64).powi(2);
    TABLE.get(degrees.wrapping_sub(1)).copied().unwrap_or(approximation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_students() {
        let known = Interval::of(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(known.mean, 2.5);
        assert!((known.margin - 3.182 * 1.290_994 / 2.0).abs() < 1e-3, "{known:?}");
        assert_eq!(Interval::of(&[1.0]).margin, f64::INFINITY);
        // From a printed table: 25, 30 and 60 degrees of freedom.
        for (degrees, quantile) in [(25, 2.060), (30, 2.042), (60, 2.000)] {
            assert!((student_t(degrees) - quantile).abs() < 2e-3, "{degrees}: {}", student_t(degrees));
        }
    }

    #[test]
    fn a_goal_is_met_only_by_the_whole_interval() {
        let said = |mean, margin| Interval { mean, margin }.verdict(1.0);
        assert_eq!(said(0.5, 0.4), "yes");
        assert_eq!(said(0.5, 0.6), "not shown");
        assert_eq!(said(-2.0, 0.5), "no");
    }

    #[test]
    fn the_busiest_moment_is_kept() {
        let mut samples = Samples::new(&["date: today".to_owned()]);
        for load in [0.5, 2.0, 0.1] {
            samples.note_load(load);
        }
        assert!(samples.to_text().starts_with("# date: today\n# processes of others, at most: 2.0\nsubject"));
    }

    #[test]
    fn a_file_says_what_was_measured() {
        let text = "# date: today\nsubject,unit,nodes,ranks,pair,where,value\n\
                    torch,images/s,2,4,1,node,10.0000\ntorch,images/s,2,4,1,container,9.9000\n\
                    torch,images/s,2,4,2,container,9.9000\n";
        let samples = Samples::parse(text).unwrap();
        assert_eq!((samples.to_text().as_str(), samples.fact("date")), (text, "today"));
        let rows: Vec<Row> = samples.rows().into_values().collect();
        // The second pair is not complete.
        assert_eq!(rows.len(), 1);
        assert_eq!(rows[0].pairs, [(10.0, 9.9)]);
        assert!((rows[0].differences()[0] + 1.0).abs() < 1e-9);
        let error = Samples::parse("torch,parsecs,2,4,1,node,1.0").unwrap_err();
        assert_eq!(format!("{error:#}"), "not a sample: torch,parsecs,2,4,1,node,1.0: unit");
    }
}
