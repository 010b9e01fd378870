//! A picture of differences: one line for each row, its pairs as dots, and the interval of their mean. SVG, written by hand: it is a
//! few lines, and a library for it would be the largest dependency of the tests.

use std::fmt::Write;

use super::samples::Interval;

/// One line of the picture.
pub struct Line {
    /// What stands before it.
    pub label: String,
    /// Percent.
    pub differences: Vec<f64>,
}

const LEFT: f64 = 230.0;
const WIDTH: f64 = 480.0;
const RIGHT: f64 = 130.0;
const STEP: f64 = 26.0;
const TOP: f64 = 56.0;

/// The picture; `goal` is the half width of the shaded part.
pub fn differences(title: &str, better: &str, goal: f64, lines: &[Line]) -> String {
    let scale = Scale::around(goal, lines);
    let bottom = TOP + STEP * lines.len() as f64;
    let (width, height) = (LEFT + WIDTH + RIGHT, bottom + 48.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<title>{title}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{title}</text>\n"
    );
    let (from, to) = (scale.x(-goal), scale.x(goal));
    let _ = writeln!(
        svg,
        "<rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#e3f1e3\"/>",
        TOP - 14.0,
        to - from,
        bottom - TOP + 14.0
    );
    for tick in scale.ticks() {
        let x = scale.x(tick);
        let (stroke, number) =
            if tick == 0.0 { ("#333333", "0".to_owned()) } else { ("#d0d0d0", format!("{tick:+}")) };
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{bottom:.1}\" stroke=\"{stroke}\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">{number}</text>",
            TOP - 14.0,
            bottom + 17.0
        );
    }
    for (number, line) in lines.iter().enumerate() {
        draw_line(&mut svg, &scale, TOP + STEP * number as f64, line);
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#555555\">container against node, percent ({better}); \
         shaded: the goal</text>\n</svg>",
        LEFT + WIDTH / 2.0,
        bottom + 37.0
    );
    svg
}

fn draw_line(svg: &mut String, scale: &Scale, y: f64, line: &Line) {
    let Interval { mean, margin } = Interval::of(&line.differences);
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
        LEFT - 14.0,
        y + 4.5,
        line.label
    );
    for difference in &line.differences {
        let _ = writeln!(
            svg,
            "<circle cx=\"{:.1}\" cy=\"{y:.1}\" r=\"2.5\" fill=\"#7aa5d2\" fill-opacity=\"0.55\"/>",
            scale.x(*difference)
        );
    }
    let (low, middle, high) = (scale.x(mean - margin), scale.x(mean), scale.x(mean + margin));
    let _ = writeln!(
        svg,
        "<path d=\"M{low:.1} {y:.1}H{high:.1}M{low:.1} {:.1}v10M{high:.1} {:.1}v10\" stroke=\"#123a6b\" stroke-width=\"2\"/>\
         <circle cx=\"{middle:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#123a6b\"/>\
         <text x=\"{:.1}\" y=\"{:.1}\">{mean:+.1} ± {margin:.1} %</text>",
        y - 5.0,
        y - 5.0,
        LEFT + WIDTH + 14.0,
        y + 4.5
    );
}

/// From percent to a place in the picture.
struct Scale {
    limit: f64,
}

impl Scale {
    /// Shows the goal with as much on both sides, and all that was measured, up to a width in which the goal can still be seen.
    fn around(goal: f64, lines: &[Line]) -> Scale {
        let farthest = lines
            .iter()
            .flat_map(|line| {
                let Interval { mean, margin } = Interval::of(&line.differences);
                line.differences.iter().copied().chain([mean - margin, mean + margin])
            })
            .filter(|percent| percent.is_finite())
            .fold(2.0 * goal, |farthest, percent| farthest.max(percent.abs()));
        Scale { limit: farthest.min(50.0 * goal) * 1.05 }
    }

    fn x(&self, percent: f64) -> f64 {
        LEFT + WIDTH / 2.0 * (1.0 + percent.clamp(-self.limit, self.limit) / self.limit)
    }

    /// Round numbers, about eight of them.
    fn ticks(&self) -> Vec<f64> {
        let distance = [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
            .into_iter()
            .find(|distance| self.limit / distance <= 5.0)
            .unwrap_or(100.0);
        let count = (self.limit / distance).floor() as i32;
        (-count..=count).map(|number| f64::from(number) * distance).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_in_the_picture() {
        let lines = [Line { label: "torch, 1 node, 1 rank".to_owned(), differences: vec![-0.4, 0.2, 9.0] }];
        let svg = differences("Training", "more is faster", 1.0, &lines);
        for part in
            ["<title>Training</title>", "torch, 1 node, 1 rank</text>", "+2.9 ± 13.1 %", "more is faster"]
        {
            assert!(svg.contains(part), "{part}\n{svg}");
        }
        assert_eq!(svg.matches("<circle").count(), 4);
        let scale = Scale::around(1.0, &lines);
        for percent in [-1e9, 0.0, 9.0, 1e9] {
            assert!((LEFT..=LEFT + WIDTH).contains(&scale.x(percent)), "{percent}");
        }
        assert_eq!(Scale { limit: 2.1 }.ticks(), [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]);
    }
}
