//! The cells of `features` and `modes`: which flags of the server each needs, how many clients it has, whether replies
//! follow a schema. A cell whose flags the server does not know does not appear, so that one for a feature to come may
//! stand here.

use std::collections::BTreeSet;

/// What a server can do.
#[derive(Clone, Debug, Default)]
pub struct Capabilities {
    /// The flags of `serve`; `None` for a server that was started by somebody else, and is as it is.
    flags: Option<BTreeSet<String>>,
}

impl Capabilities {
    /// This program's server, by its own table of flags.
    pub fn of_this_program() -> Self {
        let command = crate::cli::command();
        let serve = command.find_subcommand("serve");
        let flags = serve.into_iter().flat_map(clap::Command::get_arguments).filter_map(clap::Arg::get_long);
        Self { flags: Some(flags.map(|flag| format!("--{flag}")).collect()) }
    }

    /// A server at an address.
    pub fn foreign() -> Self {
        Self::default()
    }

    /// Whether the cell can be measured.
    pub fn allow(&self, cell: &Cell) -> bool {
        match &self.flags {
            Some(flags) => cell.needs.iter().all(|need| flags.contains(*need)),
            // Batching is its own business; everything else cannot be switched.
            None => cell.needs.is_empty() || cell.needs == ["--batch"],
        }
    }
}

/// How many clients there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// One.
    One,
    /// So many.
    Fixed(usize),
    /// As many as `--batch` says.
    Batch,
}

/// A cell.
#[derive(Clone, Copy, Debug)]
pub struct Cell {
    /// Its name; `N` stands for the number of `--batch`.
    pub name: &'static str,
    /// Flags that `serve` must know.
    pub needs: &'static [&'static str],
    /// The flags it is started with, apart from the model. `N` is the number of clients, `G` the group size that fits
    /// the model's heads, `A` the folder of an adapter.
    pub flags: &'static [&'static str],
    /// Clients at once.
    pub clients: Clients,
    /// Whether replies follow a schema.
    pub grammar: bool,
    /// What a server or model that cannot do it names when it says so, without that being a failure; nothing where every
    /// refusal is one.
    pub optional: &'static [&'static str],
    /// The cell with as many clients and without what this one is about.
    pub beside: Option<&'static str>,
}

const CELL: Cell = Cell {
    name: "",
    needs: &[],
    flags: &[],
    clients: Clients::One,
    grammar: false,
    optional: &[],
    beside: None,
};
const PACKED: &[&str] = &["kv-quant", "kv-group-size", "kv-bits", "quantized KV cache", "cannot be packed"];
const ADAPTED: &[&str] = &["adapter"];
const SERIAL: &[&str] = &["--batch", "1"];
const BATCH: &[&str] = &["--batch", "N"];
const BATCH_KV4: &[&str] = &["--batch", "N", "--kv-quant", "4", "--kv-group-size", "G"];
const BATCH_KV8: &[&str] = &["--batch", "N", "--kv-quant", "8", "--kv-group-size", "G"];
const ADAPTER: &[&str] = &["--batch", "N", "--adapter-path", "A"];
const SPEC: &[&str] = &["--batch", "1", "--draft-kind", "ngram"];

/// The cells of `features`.
pub const FEATURES: &[Cell] = &[
    Cell { name: "serial", needs: &["--batch"], flags: SERIAL, ..CELL },
    Cell {
        name: "serial+grammar",
        needs: &["--batch"],
        flags: SERIAL,
        grammar: true,
        beside: Some("serial"),
        ..CELL
    },
    Cell { name: "batchN", needs: &["--batch"], flags: BATCH, clients: Clients::Batch, ..CELL },
    Cell {
        name: "batchN+grammar",
        needs: &["--batch"],
        flags: BATCH,
        clients: Clients::Batch,
        grammar: true,
        beside: Some("batchN"),
        ..CELL
    },
    Cell {
        name: "kv8",
        needs: &["--kv-quant"],
        flags: BATCH_KV8,
        clients: Clients::Batch,
        optional: PACKED,
        beside: Some("batchN"),
        ..CELL
    },
    Cell {
        name: "kv4",
        needs: &["--kv-quant"],
        flags: BATCH_KV4,
        clients: Clients::Batch,
        optional: PACKED,
        beside: Some("batchN"),
        ..CELL
    },
    Cell {
        name: "adapters",
        needs: &["--adapter-path"],
        flags: ADAPTER,
        clients: Clients::Batch,
        optional: ADAPTED,
        beside: Some("batchN"),
        ..CELL
    },
    Cell { name: "spec", needs: &["--draft-kind"], flags: SPEC, beside: Some("serial"), ..CELL },
    Cell {
        name: "spec+grammar",
        needs: &["--draft-kind"],
        flags: SPEC,
        grammar: true,
        beside: Some("serial+grammar"),
        ..CELL
    },
];

/// The cells of `modes`.
pub const MODES: &[Cell] = &[
    Cell {
        name: "serial-l1",
        needs: &["--l1"],
        flags: &["--batch", "1", "--l1"],
        beside: Some("serial"),
        ..CELL
    },
    Cell {
        name: "serial-l2",
        needs: &["--l2"],
        flags: &["--batch", "1", "--l2"],
        beside: Some("serial"),
        ..CELL
    },
    Cell { name: "serial", needs: &["--batch"], flags: SERIAL, ..CELL },
    Cell {
        name: "serial-exact",
        needs: &["--cpu-precision"],
        flags: &["--batch", "1", "--cpu-precision", "exact"],
        beside: Some("serial"),
        ..CELL
    },
    Cell {
        name: "serial-kv4",
        needs: &["--kv-quant"],
        flags: &["--batch", "1", "--kv-quant", "4", "--kv-group-size", "G"],
        optional: PACKED,
        beside: Some("serial"),
        ..CELL
    },
    Cell {
        name: "serial-kv8",
        needs: &["--kv-quant"],
        flags: &["--batch", "1", "--kv-quant", "8", "--kv-group-size", "G"],
        optional: PACKED,
        beside: Some("serial"),
        ..CELL
    },
    Cell { name: "serial-conc4", needs: &["--batch"], flags: SERIAL, clients: Clients::Fixed(4), ..CELL },
    Cell { name: "batch2", needs: &["--batch"], flags: BATCH, clients: Clients::Fixed(2), ..CELL },
    Cell { name: "batch4", needs: &["--batch"], flags: BATCH, clients: Clients::Fixed(4), ..CELL },
    Cell {
        name: "serial-grammar",
        needs: &["--batch"],
        flags: SERIAL,
        grammar: true,
        beside: Some("serial"),
        ..CELL
    },
    Cell {
        name: "batch4-grammar",
        needs: &["--batch"],
        flags: BATCH,
        clients: Clients::Fixed(4),
        grammar: true,
        beside: Some("batch4"),
        ..CELL
    },
    Cell { name: "spec", needs: &["--draft-kind"], flags: SPEC, beside: Some("serial"), ..CELL },
    Cell {
        name: "spec-grammar",
        needs: &["--draft-kind"],
        flags: SPEC,
        grammar: true,
        beside: Some("serial-grammar"),
        ..CELL
    },
];

/// What stands in for the letters in flags.
#[derive(Clone, Debug)]
pub struct Fill {
    /// `--batch`.
    pub batch: usize,
    /// A group size that divides the features of a head.
    pub group: Option<usize>,
    /// A folder with an adapter.
    pub adapter: Option<String>,
}

impl Fill {
    /// Group sizes that caches know, for heads of so many features.
    pub fn group_of(head_dim: usize) -> Option<usize> {
        [64, 32].into_iter().find(|group| head_dim.is_multiple_of(*group))
    }
}

impl Cell {
    /// Its name with the number in place.
    pub fn label(&self, batch: usize) -> String {
        self.name.replace('N', &batch.to_string())
    }

    /// The name of the cell that it stands beside.
    pub fn beside(&self, batch: usize) -> Option<String> {
        self.beside.map(|name| name.replace('N', &batch.to_string()))
    }

    /// Requests that the server computes together.
    pub fn batch(&self, batch: usize) -> usize {
        let together = self.flags.windows(2).find(|pair| pair[0] == "--batch").map(|pair| pair[1]);
        match together {
            Some("N") => self.clients(batch),
            Some(number) => number.parse().unwrap_or(1),
            None => 1,
        }
    }

    /// How many clients it has.
    pub fn clients(&self, batch: usize) -> usize {
        match self.clients {
            Clients::One => 1,
            Clients::Fixed(count) => count,
            Clients::Batch => batch,
        }
    }

    /// Its flags with the letters replaced.
    ///
    /// # Errors
    /// Why the model cannot have it.
    pub fn flags(&self, fill: &Fill) -> Result<Vec<String>, String> {
        let flag = |flag: &&str| match *flag {
            "N" => Ok(self.clients(fill.batch).to_string()),
            "G" => match fill.group {
                Some(group) => Ok(group.to_string()),
                None => Err("no group size fits the features of the model's heads".to_owned()),
            },
            "A" => fill.adapter.clone().ok_or_else(|| "no adapter can be made for this model".to_owned()),
            flag => Ok(flag.to_owned()),
        };
        self.flags.iter().map(flag).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_features_that_are_not_there_do_not_appear() {
        let here = Capabilities::of_this_program();
        let appearing = |cells: &[Cell], capabilities: &Capabilities| {
            let names = cells.iter().filter(|cell| capabilities.allow(cell)).map(|cell| cell.label(4));
            names.collect::<Vec<_>>()
        };
        let now = ["serial", "serial+grammar", "batch4", "batch4+grammar", "kv8", "kv4", "adapters"];
        assert!(appearing(FEATURES, &here).starts_with(&now.map(str::to_owned)));
        // What a flag brings, it brings by being there.
        let mut later = here;
        later.flags.as_mut().unwrap().insert("--draft-kind".to_owned());
        assert!(appearing(FEATURES, &later).ends_with(&["spec".to_owned(), "spec+grammar".to_owned()]));
        let foreign = appearing(FEATURES, &Capabilities::foreign());
        assert_eq!(foreign, ["serial", "serial+grammar", "batch4", "batch4+grammar"]);
        assert!(appearing(MODES, &Capabilities::of_this_program()).contains(&"serial-l1".to_owned()));
        assert!(!appearing(MODES, &Capabilities::foreign()).contains(&"serial-l1".to_owned()));
    }

    #[test]
    fn letters_in_flags_are_replaced() {
        let cell = |name: &str| *FEATURES.iter().find(|cell| cell.name == name).unwrap();
        let fill = Fill { batch: 3, group: Some(32), adapter: Some("/a".to_owned()) };
        assert_eq!(cell("batchN").flags(&fill).unwrap(), ["--batch", "3"]);
        assert_eq!(cell("batchN").label(3), "batch3");
        assert_eq!(
            cell("kv4").flags(&fill).unwrap(),
            ["--batch", "3", "--kv-quant", "4", "--kv-group-size", "32"]
        );
        assert_eq!(cell("adapters").flags(&fill).unwrap(), ["--batch", "3", "--adapter-path", "/a"]);
        let bare = Fill { group: None, adapter: None, ..fill };
        assert!(cell("kv4").flags(&bare).is_err() && cell("adapters").flags(&bare).is_err());
        assert_eq!((Fill::group_of(128), Fill::group_of(96), Fill::group_of(80)), (Some(64), Some(32), None));
    }

    /// A feature costs what it costs only where nothing else differs.
    #[test]
    fn a_cell_stands_beside_one_with_the_same_clients() {
        for cells in [FEATURES, MODES] {
            for cell in cells {
                let Some(name) = cell.beside(5) else { continue };
                let other = cells.iter().find(|other| other.label(5) == name).unwrap();
                assert_eq!(cell.clients(5), other.clients(5), "{}", cell.name);
                assert_eq!(cell.batch(5), other.batch(5), "{}", cell.name);
            }
        }
        let find = |name: &str| FEATURES.iter().find(|cell| cell.name == name).unwrap();
        assert_eq!((find("kv8").batch(4), find("kv8").clients(4)), (4, 4));
        assert_eq!(
            (find("serial").batch(4), find("serial+grammar").beside(4)),
            (1, Some("serial".to_owned()))
        );
        let queue = MODES.iter().find(|cell| cell.name == "serial-conc4").unwrap();
        assert_eq!((queue.batch(4), queue.clients(4)), (1, 4));
    }

    /// Every flag of a cell that this server knows is one that it takes.
    #[test]
    fn the_servers_flags_are_spelled_as_it_spells_them() {
        let here = Capabilities::of_this_program();
        let fill = Fill { batch: 2, group: Some(64), adapter: Some("a".to_owned()) };
        for cell in FEATURES.iter().chain(MODES).filter(|cell| here.allow(cell)) {
            let mut words = vec!["mlx-bun".to_owned(), "serve".to_owned()];
            words.extend(cell.flags(&fill).unwrap());
            assert!(crate::cli::command().try_get_matches_from(&words).is_ok(), "{}", words.join(" "));
        }
    }
}
