/* SPDX-License-Identifier: MIT */
/* handover_plot.h: throughput over chunk size, as an SVG that follows the reader's light or dark theme. Plain C. */
#ifndef HANDOVER_PLOT_H
#define HANDOVER_PLOT_H

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

enum { handover_plot_points = 16, handover_plot_lines = 4 };

typedef struct handover_plot {
    char title[120];
    int points;
    double chunk_bytes[handover_plot_points], gbs[handover_plot_points];
    const char *names[handover_plot_lines]; /* of lines across: other ways, which have no chunks */
    double lines[handover_plot_lines];      /* GB/s; 0: not measured */
} handover_plot;

enum { handover_plot_width = 620, handover_plot_height = 300, handover_plot_left = 70, handover_plot_top = 130 };

static inline double handover_plot_x(const handover_plot *p, int i)
{
    return handover_plot_width * (0.5 + i) / p->points;
}

static inline double handover_plot_y(double gbs, double most)
{
    return handover_plot_height * (1 - gbs / most);
}

static inline double handover_plot_most(const handover_plot *p, double *step)
{
    double most = 0;
    for (int i = 0; i < p->points; i++)
        most = p->gbs[i] > most ? p->gbs[i] : most;
    for (int l = 0; l < handover_plot_lines; l++)
        most = p->lines[l] > most ? p->lines[l] : most;
    *step = 0.1;
    for (int i = 0; most / *step > 8; i++) /* 0.1, 0.2, 0.5, 1, ... */
        *step *= i % 3 == 1 ? 2.5 : 2;
    return *step * (floor(most / *step) + 1);
}

static inline void handover_plot_head(FILE *f, const handover_plot *p)
{
    static const char *const dashes[handover_plot_lines] = {"8 4", "2 3", "12 3 3 3", "5 5"};
    const int width = handover_plot_left + handover_plot_width + 20,
              height = handover_plot_top + handover_plot_height + 60;
    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"sans-serif\" font-size=\"13\">\n<style>\n"
            "  .back { fill: #ffffff } text { fill: #222222 } .grid { stroke: #dddddd } .axis { stroke: #555555 }\n"
            "  .other { stroke: #555555; fill: none }\n"
            "  @media (prefers-color-scheme: dark) {\n"
            "    .back { fill: #16181d } text { fill: #e4e4e4 } .grid { stroke: #3a3d44 } .axis { stroke: #b0b0b0 }\n"
            "    .other { stroke: #b0b0b0 }\n  }\n</style>\n<rect class=\"back\" width=\"%d\" height=\"%d\"/>\n",
            width, height, width, height, width, height);
    fprintf(f, "<text x=\"%d\" y=\"32\" font-size=\"18\" font-weight=\"bold\">%s</text>\n", handover_plot_left,
            p->title);
    fprintf(f, "<path d=\"M%d 54 h30\" stroke=\"#2878c8\" stroke-width=\"2\"/>\n<text x=\"%d\" y=\"59\">ring</text>\n",
            handover_plot_left, handover_plot_left + 38);
    for (int l = 0, n = 1; l < handover_plot_lines; l++) {
        if (p->lines[l] <= 0)
            continue;
        const int x = handover_plot_left + n % 2 * 310, y = 54 + n / 2 * 22;
        fprintf(f, "<path class=\"other\" d=\"M%d %d h30\" stroke-dasharray=\"%s\"/>\n", x, y, dashes[l]);
        fprintf(f, "<text x=\"%d\" y=\"%d\">%s, %.1f GB/s</text>\n", x + 38, y + 5, p->names[l], p->lines[l]);
        n++;
    }
    fprintf(f, "<g transform=\"translate(%d %d)\">\n", handover_plot_left, handover_plot_top);
    double step;
    const double most = handover_plot_most(p, &step);
    for (int l = 0; l < handover_plot_lines; l++)
        if (p->lines[l] > 0)
            fprintf(f, "<path class=\"other\" d=\"M0 %.1f h%d\" stroke-dasharray=\"%s\"/>\n",
                    handover_plot_y(p->lines[l], most), handover_plot_width, dashes[l]);
}

static inline void handover_plot_axes(FILE *f, const handover_plot *p, double most, double step)
{
    for (double gbs = 0; gbs < most + step / 2; gbs += step) {
        const double y = handover_plot_y(gbs, most);
        fprintf(f, "<path class=\"%s\" d=\"M0 %.1f h%d\"/>\n", gbs > 0 ? "grid" : "axis", y, handover_plot_width);
        fprintf(f, "<text x=\"-8\" y=\"%.1f\" text-anchor=\"end\">%.4g</text>\n", y + 4, gbs);
    }
    for (int i = 0; i < p->points; i++)
        fprintf(f, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.3g</text>\n", handover_plot_x(p, i),
                handover_plot_height + 18, p->chunk_bytes[i] / 1048576);
    fprintf(f, "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">MB of a chunk; GB/s upwards</text>\n",
            handover_plot_width / 2, handover_plot_height + 40);
}

/* Where the plot is written: beside its place, so that a file is there only when it is complete; but a device, a pipe
   or a link is written itself, and never replaced. */
static inline bool handover_plot_part(const char *path, char part[4096])
{
    struct stat found;
    const bool itself = lstat(path, &found) == 0 && !S_ISREG(found.st_mode);
    const int n = snprintf(part, 4096, itself ? "%s" : "%s.part", path);
    errno = ENAMETOOLONG;
    return n > 0 && n < 4096;
}

/* Whether a file can be written there; false: errno says why not. */
static inline bool handover_plot_possible(const char *path)
{
    char part[4096];
    FILE *const f = handover_plot_part(path, part) ? fopen(part, "w") : NULL;
    return f && fclose(f) == 0 && (strcmp(part, path) == 0 || remove(part) == 0);
}

/* False: errno says why, and no file is left half written. */
static inline bool handover_plot_write(const handover_plot *p, const char *path)
{
    char part[4096];
    double step;
    const double most = handover_plot_most(p, &step);
    FILE *const f = handover_plot_part(path, part) ? fopen(part, "w") : NULL;
    if (!f)
        return false;
    handover_plot_head(f, p);
    handover_plot_axes(f, p, most, step);
    for (int i = 0; i < p->points; i++)
        fprintf(f, "%s%.1f %.1f", i ? " L" : "<path fill=\"none\" stroke=\"#2878c8\" stroke-width=\"2\" d=\"M",
                handover_plot_x(p, i), handover_plot_y(p->gbs[i], most));
    fprintf(f, "%s", p->points ? "\"/>\n" : "");
    for (int i = 0; i < p->points; i++)
        fprintf(f, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"#2878c8\"/>\n", handover_plot_x(p, i),
                handover_plot_y(p->gbs[i], most));
    fprintf(f, "</g>\n</svg>\n");
    const bool whole = !ferror(f), closed = fclose(f) == 0, itself = strcmp(part, path) == 0;
    if (whole && closed && (itself || rename(part, path) == 0))
        return true;
    const int error = errno;
    if (!itself)
        (void)remove(part);
    errno = error;
    return false;
}

#endif
