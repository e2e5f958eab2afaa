//! How values of rows are written to SQLite's columns and read back, whatever an older program left there.

use rusqlite::types::{Value as SqlValue, ValueRef};
use serde_json::Value;

use super::rows::Figures;

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellKind {
    /// Whole numbers.
    Integer,
    /// Numbers.
    Real,
    /// Text.
    Text,
    /// JSON text.
    Json,
}

impl CellKind {
    /// SQLite's name of the type.
    pub(super) fn sql(self) -> &'static str {
        match self {
            Self::Integer => "INTEGER",
            Self::Real => "REAL",
            Self::Text | Self::Json => "TEXT",
        }
    }
}

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub kind: CellKind,
}

/// A column's value in one row.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Nothing is known.
    Null,
    /// A whole number.
    Integer(i64),
    /// A number.
    Real(f64),
    /// Text, or JSON text.
    Text(String),
}

impl From<Cell> for SqlValue {
    fn from(cell: Cell) -> Self {
        match cell {
            Cell::Null => Self::Null,
            Cell::Integer(value) => Self::Integer(value),
            Cell::Real(value) => Self::Real(value),
            Cell::Text(value) => Self::Text(value),
        }
    }
}

/// A type that fields of rows have. Reading never fails: what cannot be understood is as if it were not there.
pub(super) trait Field: Default {
    const KIND: CellKind;

    fn to_cell(&self) -> Cell;

    fn from_sql(value: ValueRef) -> Self;
}

fn integer(value: ValueRef) -> Option<i64> {
    match value {
        ValueRef::Integer(value) => Some(value),
        // Written by a program whose only numbers are floats.
        ValueRef::Real(value) if value.fract() == 0.0 && value.abs() < 9e15 => Some(value as i64),
        _ => None,
    }
}

fn text(value: ValueRef) -> Option<String> {
    value.as_str().ok().map(str::to_owned)
}

impl Field for i64 {
    const KIND: CellKind = CellKind::Integer;

    fn to_cell(&self) -> Cell {
        Cell::Integer(*self)
    }

    fn from_sql(value: ValueRef) -> Self {
        integer(value).unwrap_or_default()
    }
}

impl Field for bool {
    const KIND: CellKind = CellKind::Integer;

    fn to_cell(&self) -> Cell {
        Cell::Integer(i64::from(*self))
    }

    fn from_sql(value: ValueRef) -> Self {
        integer(value).is_some_and(|value| value != 0)
    }
}

impl Field for Option<u64> {
    const KIND: CellKind = CellKind::Integer;

    fn to_cell(&self) -> Cell {
        self.map_or(Cell::Null, |value| Cell::Integer(i64::try_from(value).unwrap_or(i64::MAX)))
    }

    fn from_sql(value: ValueRef) -> Self {
        integer(value).and_then(|value| u64::try_from(value).ok())
    }
}

impl Field for Option<f64> {
    const KIND: CellKind = CellKind::Real;

    fn to_cell(&self) -> Cell {
        self.filter(|value| value.is_finite()).map_or(Cell::Null, Cell::Real)
    }

    fn from_sql(value: ValueRef) -> Self {
        match value {
            ValueRef::Real(value) => Some(value).filter(|value| value.is_finite()),
            ValueRef::Integer(value) => Some(value as f64),
            _ => None,
        }
    }
}

impl Field for String {
    const KIND: CellKind = CellKind::Text;

    fn to_cell(&self) -> Cell {
        Cell::Text(self.clone())
    }

    fn from_sql(value: ValueRef) -> Self {
        text(value).unwrap_or_default()
    }
}

impl Field for Option<String> {
    const KIND: CellKind = CellKind::Text;

    fn to_cell(&self) -> Cell {
        self.clone().map_or(Cell::Null, Cell::Text)
    }

    fn from_sql(value: ValueRef) -> Self {
        text(value)
    }
}

impl Field for Value {
    const KIND: CellKind = CellKind::Json;

    fn to_cell(&self) -> Cell {
        if self.is_null() { Cell::Null } else { Cell::Text(self.to_string()) }
    }

    fn from_sql(value: ValueRef) -> Self {
        value.as_str().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

impl Field for Figures {
    const KIND: CellKind = CellKind::Json;

    fn to_cell(&self) -> Cell {
        serde_json::to_string(self).map_or(Cell::Null, Cell::Text)
    }

    fn from_sql(value: ValueRef) -> Self {
        value.as_str().ok().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}
