//! mizzen.toml(5), made of the file that is installed: a test keeps that complete and its values the defaults.

use mizzen_core::config::uncommented;

use super::{roff, see_also, title};

/// The file, with every key and its default.
pub(crate) const SAMPLE: &str = include_str!("../../../conf/mizzen.toml");

const NAME: &str = r#".SH NAME
mizzen.toml \- the settings of a site for its containers
.SH SYNOPSIS
.I /etc/mizzen/mizzen.toml
.br
.I /etc/mizzen/mizzen.d/*.toml
.SH DESCRIPTION
"#;

const TAIL: &str = r#".PP
The argument config=PATH of the plugin in plugstack.conf names another file; commands that are typed by hand read that one, too. A file that is broken is reported to jobs with a container, and to no others.
.BR mizzen\-check\-config (1)
checks the files,
.BR mizzen\-config\-show (1)
tells which file and line each value comes from.
.SS Drop\-ins
Files whose names end in .toml, in the directory beside the file that has .d in place of .toml (/srv/site.d beside /srv/site.toml, /srv/site.conf.d beside /srv/site.conf). They are read after the file, in the byte order of their names: 10.toml before 9.toml, Z.toml before a.toml. Hidden files are left out. What a later file says of a key holds: a list replaces the whole list of an earlier file. Tables are merged key by key, so that a list of [policy] or a mirror of one registry can stand in a file of its own; a rule of [policy] that an earlier file has made cannot be taken back, only replaced.
.PP
Each file must be good by itself, belong to root and be writable by nobody else, as must the directory and those above it. A link, a directory or a device with such a name is refused. All drop\-ins together may have 1 MiB, and the directory 1000 entries.
"#;

/// The page.
pub(super) fn page() -> String {
    let sample = uncommented(SAMPLE);
    let mut blocks = sample.split("\n\n");
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
        let sample = uncommented(SAMPLE);
        let keys = sample.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        for key in keys {
            assert!(page.contains(&format!("\n\\fB{}\\fR\n", roff(key))), "{key}");
        }
        assert!(page.contains("\n[policy]\n") && page.contains("\nplain_http = true\n"), "{page}");
    }
}
