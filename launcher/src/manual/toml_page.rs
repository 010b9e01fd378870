//! mizzen.toml(5), made of the file that is installed: a test keeps that complete and its values the defaults.

use super::{roff, see_also, title};

const SAMPLE: &str = include_str!("../../../conf/mizzen.toml");

const NAME: &str = r#".SH NAME
mizzen.toml \- the settings of a site for its containers
.SH SYNOPSIS
.I /etc/mizzen/mizzen.toml
.SH DESCRIPTION
"#;

const TAIL: &str = r#".PP
The argument config=PATH of the plugin in plugstack.conf names another file. A file that is broken is reported to jobs with a container, and to no others.
.BR mizzen\-check\-config (1)
checks it.
"#;

/// The page.
pub(super) fn page() -> String {
    let mut blocks = SAMPLE.split("\n\n");
    let mut page = title("mizzen.toml", 5);
    page.push_str(NAME);
    page.push_str(&Block::new(blocks.next().unwrap_or_default()).description());
    page.push_str(TAIL);
    page.push_str(".SH KEYS\n");
    for block in blocks {
        page.push_str(&Block::new(block).entry());
    }
    page.push_str(&see_also("mizzen.toml"));
    page
}

/// What stands between two empty lines of the file: a text, and the keys that it is about, or an example of tables.
#[derive(Default)]
struct Block<'a> {
    text: Vec<&'a str>,
    keys: Vec<&'a str>,
    example: Vec<&'a str>,
}

impl Block<'_> {
    fn new(block: &str) -> Block<'_> {
        let mut found = Block::default();
        for line in block.lines() {
            match line.strip_prefix('#').map(str::trim_start) {
                None => found.keys.push(line),
                Some(line) if line.starts_with('[') || !found.example.is_empty() => found.example.push(line),
                Some("") => {}
                Some(line) => found.text.push(line),
            }
        }
        found
    }

    fn description(&self) -> String {
        roff(&self.text.join(" ")) + "\n"
    }

    fn entry(&self) -> String {
        let mut page = String::new();
        for (number, key) in self.keys.iter().enumerate() {
            page.push_str(&format!("{}\n\\fB{}\\fR\n", if number == 0 { ".TP" } else { ".TQ" }, roff(key)));
        }
        if let Some(table) = self.example.first() {
            page.push_str(&format!(".SS {}]\n", table.split(['.', ']']).next().unwrap_or_default()));
        }
        page.push_str(&self.description());
        if !self.example.is_empty() {
            let lines =
                self.example.iter().map(|line| if line.is_empty() { ".sp".to_owned() } else { roff(line) });
            page.push_str(&format!(".RS\n.nf\n{}\n.fi\n.RE\n", lines.collect::<Vec<String>>().join("\n")));
        }
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_keys_with_a_text_or_an_example() {
        let keys = Block::new("# How much, and\n# how little.\nmax = \"50%\"\nmin = \"\"");
        let page =
            ".TP\n\\fBmax = \\(dq50%\\(dq\\fR\n.TQ\n\\fBmin = \\(dq\\(dq\\fR\nHow much, and how little.\n";
        assert_eq!(keys.entry(), page);
        let tables = Block::new("# Tables. For example:\n#\n# [a]\n# b = 1\n#\n# [c]");
        assert_eq!(
            tables.entry(),
            ".SS [a]\nTables. For example:\n.RS\n.nf\n[a]\nb = 1\n.sp\n[c]\n.fi\n.RE\n"
        );
    }

    #[test]
    fn every_key_is_on_the_page() {
        let page = page();
        let keys = SAMPLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        for key in keys {
            assert!(page.contains(&format!("\n\\fB{}\\fR\n", roff(key))), "{key}");
        }
        assert!(page.contains("\n[policy]\n") && page.contains("\nplain_http = true\n"), "{page}");
    }
}
