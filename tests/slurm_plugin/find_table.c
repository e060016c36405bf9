/* Says whether option.c finds Slurm's option table in this program, which is none of Slurm's. */
#include <stdio.h>

#include "option.h"

int main(void)
{
    char sentence[TP_SENTENCE] = "";
    bool found = tp_options_find(sentence);

    puts(found ? "found" : sentence);
    return 0;
}
