//! What progress looks like, as a function of what is known.
//!
//! Run by: the user, in the importer.

use std::time::Duration;

use mizzen::report::megabytes;

/// Characters of a bar.
const BAR: u64 = 24;
/// Characters of a name, at most.
const NAME: usize = 24;

/// The bar of the image, which is written when all layers are there.
pub const WRITING: &str = "writing";

/// A bar at a moment.
pub struct State<'a> {
    pub name: &'a str,
    /// Bytes, if it is known how many there are.
    pub total: Option<u64>,
    pub done: u64,
    /// How it ended, if it has.
    pub outcome: Option<&'static str>,
}

impl State<'_> {
    fn percent(&self) -> Option<u64> {
        let total = self.total?;
        Some(self.done.saturating_mul(100).checked_div(total).unwrap_or(100).min(100))
    }

    /// One line, without its end.
    fn line(&self) -> String {
        let name = shortened(self.name, NAME);
        let (done, total) = (megabytes(self.done), self.total.map(megabytes));
        match (self.outcome, self.percent(), total) {
            (Some(outcome), ..) => format!("{name:<NAME$} {outcome}"),
            (None, Some(percent), Some(total)) => {
                format!("{name:<NAME$} {} {percent:>3} % {done} of {total}", bar(percent))
            }
            (None, ..) if self.done == 0 => format!("{name:<NAME$} waiting"),
            (None, ..) => format!("{name:<NAME$} {done}"),
        }
    }
}

/// One line for each bar, as far as there is space. Where there is not, what is under way comes first, and a last line
/// counts the others.
pub fn lines(states: &[State], width: usize, height: usize) -> Vec<String> {
    // The cursor is in a line of its own, and what was there before shall still be seen.
    let room = height.saturating_sub(2).max(1);
    let cut = |line: String| line.chars().take(width.saturating_sub(1)).collect::<String>();
    if states.len() <= room {
        return states.iter().map(|state| cut(state.line())).collect();
    }
    let under_way = |state: &&State| state.outcome.is_none() && state.done > 0;
    let shown: Vec<&State> = states.iter().filter(under_way).take(room - 1).collect();
    let ended = states.iter().filter(|state| state.outcome.is_some()).count();
    let waiting = states.len() - ended - states.iter().filter(under_way).count();
    let mut lines: Vec<String> = shown.iter().map(|state| cut(state.line())).collect();
    let hidden = states.len() - shown.len() - ended - waiting;
    let hidden = if hidden > 0 { format!(", {hidden} more under way") } else { String::new() };
    let all = states.len();
    lines.push(cut(format!("{ended} of {all} done{hidden}, {waiting} waiting")));
    lines
}

/// All bars in one line: what has arrived, and how much of the image is written.
pub fn sum(states: &[State], elapsed: Duration) -> String {
    let writing = states.iter().find(|state| state.name == WRITING).and_then(State::percent);
    let writing = writing.map_or_else(String::new, |percent| format!(", writing {percent} %"));
    let states: Vec<&State> = states.iter().filter(|state| state.name != WRITING).collect();
    let done: u64 = states.iter().map(|state| state.done).sum();
    let rate = done as f64 / elapsed.as_secs_f64().max(0.001) / 1e6;
    let ended = states.iter().filter(|state| state.outcome.is_some()).count();
    // What was in the cache needs no bytes.
    let open = states.iter().filter(|state| state.outcome.is_none() || state.done > 0);
    let totals: Option<u64> = open.map(|state| state.total).sum();
    let bytes = match totals.filter(|total| *total > 0) {
        Some(total) => {
            let percent = done.saturating_mul(100).checked_div(total).unwrap_or(100).min(100);
            format!("{percent} %, {} of {}", megabytes(done), megabytes(total))
        }
        None => megabytes(done),
    };
    // A directory, or a container that is saved, has none.
    let layers =
        if states.len() == 1 { String::new() } else { format!(", {ended} of {} layers done", states.len()) };
    format!("{bytes} ({rate:.0} MB/s){layers}{writing}")
}

/// What a terminal shows, and how it is replaced.
#[derive(Default)]
pub struct Screen {
    lines: Vec<String>,
}

impl Screen {
    /// The text that puts these lines in the place of the others. Nothing if they are the same.
    pub fn redraw(&mut self, lines: Vec<String>) -> String {
        if lines == self.lines {
            return String::new();
        }
        let mut text = self.up();
        for line in &lines {
            text.push_str(line);
            text.push_str("\x1b[K\n");
        }
        // Lines that were there and are not any more.
        text.push_str("\x1b[J");
        self.lines = lines;
        text
    }

    /// The text that takes them all away.
    pub fn clear(&mut self) -> String {
        let text = self.up();
        let text = if text.is_empty() { text } else { text + "\x1b[J" };
        self.lines.clear();
        text
    }

    fn up(&self) -> String {
        match self.lines.len() {
            0 => String::new(),
            count => format!("\r\x1b[{count}A"),
        }
    }
}

fn bar(percent: u64) -> String {
    let full = (percent * BAR / 100) as usize;
    format!("[{}{}]", "#".repeat(full), "-".repeat(BAR as usize - full))
}

/// A text of so many characters at most; its end says more than its beginning.
fn shortened(text: &str, room: usize) -> String {
    let surplus = text.chars().count().saturating_sub(room);
    text.chars().skip(surplus).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state<'a>(name: &'a str, total: Option<u64>, done: u64, outcome: Option<&'static str>) -> State<'a> {
        State { name, total, done, outcome }
    }

    #[test]
    fn each_layer_has_a_line() {
        let states = [
            state("3b4c5d6e7f80", Some(200_000_000), 50_000_000, None),
            state("second", Some(10), 0, None),
            state("third", None, 0, None),
            state("fourth", None, 1_500_000, None),
            state("fifth", Some(10), 10, Some("done")),
            state("sixth", Some(10), 0, Some("cached")),
            state("a-name-that-is-longer-than-it-may-be", Some(0), 0, None),
        ];
        assert_eq!(
            lines(&states, 80, 24),
            [
                "3b4c5d6e7f80             [######------------------]  25 % 50.0 MB of 200.0 MB",
                "second                   [------------------------]   0 % 0.0 MB of 0.0 MB",
                "third                    waiting",
                "fourth                   1.5 MB",
                "fifth                    done",
                "sixth                    cached",
                "is-longer-than-it-may-be [########################] 100 % 0.0 MB of 0.0 MB",
            ]
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let states = [state("é".repeat(40).leak(), Some(9), 4, None)];
        for width in [0, 1, 2, 10, 25, 40, 79, 200] {
            let lines = lines(&states, width, 24);
            assert!(lines[0].chars().count() < width.max(1), "{width}: {lines:?}");
        }
    }

    #[test]
    fn of_many_layers_those_under_way_are_shown() {
        let mut states: Vec<State> = (0..100).map(|_| state("waits", Some(10), 0, None)).collect();
        states[..10].fill_with(|| state("ended", Some(10), 10, Some("done")));
        for index in [20, 30, 40] {
            states[index] = state("runs", Some(10), 5, None);
        }
        let drawn = lines(&states, 80, 24);
        assert_eq!(drawn.len(), 4);
        assert!(drawn[..3].iter().all(|line| line.starts_with("runs ")), "{drawn:?}");
        assert_eq!(drawn[3], "10 of 100 done, 87 waiting");
        let drawn = lines(&states, 80, 5);
        assert_eq!(drawn.len(), 3);
        assert_eq!(drawn[2], "10 of 100 done, 1 more under way, 87 waiting");
        for height in 0..4 {
            assert!(lines(&states, 80, height).len() <= height.saturating_sub(2).max(1), "{height}");
        }
        assert_eq!(lines(&states, 80, 102).len(), 100);
    }

    #[test]
    fn elsewhere_one_line_tells_the_sum() {
        let second = Duration::from_secs(1);
        let states = [
            state("a", Some(100_000_000), 50_000_000, None),
            state("b", Some(100_000_000), 0, None),
            state("c", Some(300_000_000), 0, Some("cached")),
            state("d", Some(10_000_000), 10_000_000, Some("done")),
        ];
        assert_eq!(sum(&states, second), "28 %, 60.0 MB of 210.0 MB (60 MB/s), 2 of 4 layers done");
        let unknown = [state("a", None, 5_000_000, None), state("b", Some(9), 0, None)];
        assert_eq!(sum(&unknown, second), "5.0 MB (5 MB/s), 0 of 2 layers done");
        assert_eq!(sum(&unknown[..1], second), "5.0 MB (5 MB/s)");
        // What is saved is read, and then written: no byte counts twice.
        let saved =
            [state("a", None, 5_000_000, Some("read")), state(WRITING, Some(4_000_000), 1_000_000, None)];
        assert_eq!(sum(&saved, second), "5.0 MB (5 MB/s), writing 25 %");
        assert_eq!(sum(&[], second), "0.0 MB (0 MB/s), 0 of 0 layers done");
        let more = [state("a", Some(5), 500, None)];
        assert!(sum(&more, Duration::ZERO).starts_with("100 %"), "a registry that sends more than it says");
    }

    #[test]
    fn lines_take_the_place_of_others() {
        let mut screen = Screen::default();
        assert_eq!(screen.clear(), "");
        let one = || vec!["one".to_owned()];
        assert_eq!(screen.redraw(one()), "one\x1b[K\n\x1b[J");
        assert_eq!(screen.redraw(one()), "", "nothing has changed");
        assert_eq!(
            screen.redraw(vec!["one".to_owned(), "two".to_owned()]),
            "\r\x1b[1Aone\x1b[K\ntwo\x1b[K\n\x1b[J"
        );
        assert_eq!(screen.redraw(one()), "\r\x1b[2Aone\x1b[K\n\x1b[J");
        assert_eq!(screen.clear(), "\r\x1b[1A\x1b[J");
        assert_eq!(screen.clear(), "");
    }
}
